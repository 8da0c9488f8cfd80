"""Tokens by which models mark calls of tools and reasoning. They are text to the reader of the answer, even where a
tokenizer calls them special.
"""

from __future__ import annotations

THINK, END_THINK = "<think>", "</think>"
TOOL_CALL, END_TOOL_CALL = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
TOOL_CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"

MARKERS = frozenset({THINK, END_THINK, TOOL_CALL, END_TOOL_CALL, PYTHON_TAG, TOOL_CALLS, ARGS, CALL_ID})
