"""OpenAI's Responses: a shape over the path of a chat, without stored state."""
