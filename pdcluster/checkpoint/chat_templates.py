"""The chat templates of a model that are used, and the files that may hold them."""

from __future__ import annotations

# For prompts with tools, and for others.
TOOL_TEMPLATE, DEFAULT_TEMPLATE = "tool_use", "default"
# By file. A later one of the same name wins.
TEMPLATE_FILES = {
    "chat_template.jinja": DEFAULT_TEMPLATE,
    "additional_chat_templates/default.jinja": DEFAULT_TEMPLATE,
    "additional_chat_templates/tool_use.jinja": TOOL_TEMPLATE,
}
