"""Drawn conversations and drawn outputs over the three chat APIs: the same prompt to the token, the same answer whole and
streamed, events in the order that clients need, and counts that are the usage."""

from __future__ import annotations

import json
from array import array
from typing import Any, NamedTuple

from agent_streams import (
    Json,
    MessageStream,
    ResponseStream,
    check_end,
    check_message,
    check_response,
    num_prompt_tokens,
)
from chat_router import Router
from drawn_examples import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_dispatcher import EOS, TEXT, Step, Tokens

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
COUNT = "/v1/messages/count_tokens"
NAMES = ("get_weather", "add")
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
STOP = "END"

WORDS = st.lists(
    st.sampled_from(["hello", "ü", "日本", "a b", "\n", "{", "<", "E", "10 €", "."]), min_size=1, max_size=5
).map(" ".join)
ARGUMENTS = st.dictionaries(
    st.sampled_from(["city", "n", "ü"]),
    st.text(max_size=6) | st.integers() | st.none() | st.lists(st.booleans()),
    max_size=3,
)


# ---------------------------------------------------------------- what a model says


class Call(NamedTuple):
    name: str
    arguments: Json

    @property
    def text(self) -> str:
        said = json.dumps({"name": self.name, "arguments": self.arguments}, ensure_ascii=False)
        return f"<tool_call>\n{said}\n</tool_call>"


CALLS = st.builds(Call, st.sampled_from(NAMES), ARGUMENTS)


class Output(NamedTuple):
    """What the model says, in chunks of `sizes` tokens, and after how many tokens it is cut."""

    text: str
    sizes: list[int]
    max_tokens: int

    def steps(self) -> list[Step]:
        ids, steps, sizes = [*TEXT.encode(self.text, add_special_tokens=False), EOS], list[Step](), self.sizes
        while ids:
            size = sizes[len(steps) % len(sizes)]
            steps.append(Tokens(tuple(ids[:size])))
            ids = ids[size:]
        return steps


@st.composite
def outputs(draw: st.DrawFn) -> Output:
    thoughts = draw(st.none() | WORDS)
    parts = draw(st.lists(WORDS | CALLS | st.just(STOP), min_size=0, max_size=4))
    text = "" if thoughts is None else f"<think>\n{thoughts}\n</think>\n"
    text += draw(st.sampled_from(["", " ", "\n"])).join(each.text if isinstance(each, Call) else each for each in parts)
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    return Output(text, sizes, draw(st.just(1000) | st.integers(1, 40)))


# ---------------------------------------------------------------- what was said before


class Turn(NamedTuple):
    """Words of the user, the assistant's answer to them, and its calls with their results."""

    words: str
    answer: str
    calls: list[tuple[Call, str]]


TURNS = st.lists(st.builds(Turn, WORDS, WORDS, st.lists(st.tuples(CALLS, WORDS), max_size=2)), max_size=3)


class Asked(NamedTuple):
    system: str | None
    turns: list[Turn]
    words: str
    has_tools: bool

    def chat(self) -> Json:
        messages: list[Json] = [] if self.system is None else [{"role": "system", "content": self.system}]
        for number, turn in enumerate(self.turns):
            messages.append({"role": "user", "content": turn.words})
            calls = [
                {
                    "id": f"c{number}{index}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for index, (call, _) in enumerate(turn.calls)
            ]
            messages.append({"role": "assistant", "content": turn.answer} | ({"tool_calls": calls} if calls else {}))
            messages += [
                {"role": "tool", "tool_call_id": f"c{number}{index}", "content": result}
                for index, (_, result) in enumerate(turn.calls)
            ]
        functions = [{"name": name, "description": "d", "parameters": SCHEMA} for name in NAMES]
        tools = {"tools": [{"type": "function", "function": each} for each in functions]} if self.has_tools else {}
        return {"messages": [*messages, {"role": "user", "content": self.words}], **tools}

    def messages(self) -> Json:
        messages: list[Json] = []
        for number, turn in enumerate(self.turns):
            results = self._results(number - 1)
            messages.append({"role": "user", "content": [*results, {"type": "text", "text": turn.words}]})
            used = [
                {"type": "tool_use", "id": f"c{number}{index}", "name": call.name, "input": call.arguments}
                for index, (call, _) in enumerate(turn.calls)
            ]
            messages.append({"role": "assistant", "content": [{"type": "text", "text": turn.answer}, *used]})
        messages.append(
            {"role": "user", "content": [*self._results(len(self.turns) - 1), {"type": "text", "text": self.words}]}
        )
        tools = (
            {"tools": [{"name": name, "description": "d", "input_schema": SCHEMA} for name in NAMES]}
            if self.has_tools
            else {}
        )
        return {"messages": messages, **({} if self.system is None else {"system": self.system}), **tools}

    def _results(self, number: int) -> list[Json]:
        if number < 0:
            return []
        return [
            {"type": "tool_result", "tool_use_id": f"c{number}{index}", "content": result}
            for index, (_, result) in enumerate(self.turns[number].calls)
        ]

    def responses(self) -> Json:
        items: list[Json] = []
        for number, turn in enumerate(self.turns):
            items.append({"role": "user", "content": turn.words})
            items.append({"role": "assistant", "content": turn.answer})
            calls = [(f"c{number}{index}", *each) for index, each in enumerate(turn.calls)]
            items += [
                {
                    "type": "function_call",
                    "call_id": call_id,
                    "name": call.name,
                    "arguments": json.dumps(call.arguments),
                }
                for call_id, call, _ in calls
            ]
            items += [
                {"type": "function_call_output", "call_id": call_id, "output": result} for call_id, _, result in calls
            ]
        tools = [{"type": "function", "name": name, "description": "d", "parameters": SCHEMA} for name in NAMES]
        fields = {"tools": tools} if self.has_tools else {}
        instructions = {} if self.system is None else {"instructions": self.system}
        return {"input": [*items, {"role": "user", "content": self.words}], **instructions, **fields}


ASKED = st.builds(Asked, st.none() | WORDS, TURNS, WORDS, st.booleans())


# ---------------------------------------------------------------- answers, told alike


class Answer(NamedTuple):
    """What each API tells: thoughts, text, calls, why it ended, tokens of prompt and output."""

    thoughts: str
    text: str
    calls: list[tuple[str, str]]
    end: str
    num_prompt: int
    num_output: int


def of_chat(reply: Json) -> Answer:
    choice, usage = reply["choices"][0], reply["usage"]
    message, calls = choice["message"], choice["message"].get("tool_calls") or []
    said = [(each["function"]["name"], each["function"]["arguments"]) for each in calls]
    texts = message.get("reasoning_content") or "", message["content"] or ""
    return Answer(*texts, said, choice["finish_reason"], usage["prompt_tokens"], usage["completion_tokens"])


def of_message(message: Json) -> Answer:
    ends = {"end_turn": "stop", "stop_sequence": "stop", "tool_use": "tool_calls", "max_tokens": "length"}
    said: dict[str, list[str]] = {"thinking": [""], "text": [""]}
    calls = []
    for block in message["content"]:
        if block["type"] == "tool_use":
            calls.append((block["name"], json.dumps(block["input"])))
        else:
            said[block["type"]].append(block[block["type"]])
    num_prompt, num_output = num_prompt_tokens(message["usage"]), message["usage"]["output_tokens"]
    return Answer(
        "".join(said["thinking"]), "".join(said["text"]), calls, ends[message["stop_reason"]], num_prompt, num_output
    )


def of_response(response: Json) -> Answer:
    thoughts, text, calls = "", "", []
    for item in response["output"]:
        if item["type"] == "function_call":
            calls.append((item["name"], item["arguments"]))
        elif item["type"] == "reasoning":
            thoughts += "".join(part["text"] for part in item["content"] or item["summary"])
        else:
            text += "".join(part["text"] for part in item["content"])
    end = "length" if response["status"] == "incomplete" else "tool_calls" if calls else "stop"
    return Answer(thoughts, text, calls, end, response["usage"]["input_tokens"], response["usage"]["output_tokens"])


class Seen(NamedTuple):
    prompts: list[array[int]]
    chat: Answer
    messages: list[Answer]
    responses: list[Answer]


def asked_of_all(router: Router, asked: Asked, output: Output) -> Seen:
    dispatcher, cut = router.dispatcher, output.max_tokens
    dispatcher.started.clear()
    dispatcher.script = lambda _: output.steps()
    chat = of_chat(router.told(CHAT, asked.chat(), stop=[STOP], max_tokens=cut).json())
    fields: Json = {"stop_sequences": [STOP], "max_tokens": cut}
    message = router.told(MESSAGES, asked.messages(), **fields).json()
    check_message(message)
    check_end(message)
    stream = MessageStream(router.told(MESSAGES, asked.messages(), stream=True, **fields).text)
    assert stream.error is None, stream.error
    response = router.told(RESPONSES, asked.responses(), max_output_tokens=cut).json()
    check_response(response, response["status"])
    streamed = ResponseStream(
        router.told(RESPONSES, asked.responses(), max_output_tokens=cut, stream=True).text
    ).response
    prompts = [each.token_ids for each in dispatcher.started]
    return Seen(
        prompts, chat, [of_message(message), of_message(stream.message)], [of_response(response), of_response(streamed)]
    )


def is_alike(one: Answer, other: Answer) -> bool:
    """But for white space at the ends of texts, which calls between them decide, and how arguments are written."""
    texts = [(each.thoughts.split(), each.text.split()) for each in (one, other)]
    return texts[0] == texts[1] and one._replace(thoughts="", text="", calls=[]) == other._replace(
        thoughts="", text="", calls=[]
    )


def parsed(answer: Answer) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in answer.calls]


@settings(max_examples=examples(60, 600))
@given(asked=ASKED, output=outputs())
def test_the_three_apis_ask_and_answer_alike(router: Router, asked: Asked, output: Output) -> None:
    """Prompts are equal to the token. Whole and streamed answers are equal. Without a stop string all three tell the same:
    Responses have none."""
    seen = asked_of_all(router, asked, output)
    first, *others = seen.prompts
    assert len(others) == 4 and all(each == first for each in others)
    assert seen.messages[0] == seen.messages[1] and seen.responses[0] == seen.responses[1]
    assert is_alike(seen.chat, seen.messages[0]), (seen.chat, seen.messages[0])
    if seen.chat.end != "length":
        assert parsed(seen.chat) == parsed(seen.messages[0])
    if STOP not in output.text:
        assert is_alike(seen.chat, seen.responses[0]), (seen.chat, seen.responses[0])
        assert seen.chat.calls == seen.responses[0].calls


@settings(max_examples=50)
@given(asked=ASKED)
def test_the_count_of_a_request_is_its_usage(router: Router, asked: Asked) -> None:
    router.dispatcher.started.clear()
    counted = router.told(COUNT, asked.messages()).json()["input_tokens"]
    usage = router.told(MESSAGES, asked.messages(), max_tokens=4).json()["usage"]
    assert counted == num_prompt_tokens(usage) == len(router.dispatcher.started[0].token_ids)
