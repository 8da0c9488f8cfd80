"""What clients of several libraries ask: a question, and a tool that the model may call."""

ASKED = [{"role": "user", "content": "What does `shutil.copyfile` do?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
# The same tool as Anthropic's API has it.
TOOL = {
    "name": WEATHER["function"]["name"],
    "description": WEATHER["function"]["description"],
    "strict": True,
    "input_schema": WEATHER["function"]["parameters"],
}
# And as Responses has it.
FUNCTION = {"type": "function", **WEATHER["function"]}
