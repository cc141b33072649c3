"""Tools through the server, with OpenAI's own library: the model asks for a function, this program runs it.

    moeflux serve                                  in another terminal
    pip install openai
    python examples/tools_openai.py

A model that was trained to call tools decides by itself when to: leave out `tool_choice`. The built-in one was not, so
the server makes it: it keeps what the model writes to the schema, token by token.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

from openai import OpenAI

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "enum": ["Paris", "Madrid", "Rome"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def weather(city: str) -> dict[str, Any]:
    """A program would ask somebody who knows."""
    return {"city": city, "sky": "blue", "degrees": 21}


FUNCTIONS = {"weather": weather}


def main() -> None:
    parser = argparse.ArgumentParser(description="Tools through the server.")
    parser.add_argument("--url", default="http://127.0.0.1:8080/v1", help="of the server")
    parser.add_argument("--question", default="What is the weather in Paris?")
    arguments = parser.parse_args()

    client = OpenAI(base_url=arguments.url, api_key="none")
    name = client.models.list().data[0].id
    messages: list[Any] = [{"role": "user", "content": arguments.question}]
    asked = client.chat.completions.create(
        model=name, messages=messages, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, temperature=0
    )
    message = asked.choices[0].message
    messages.append(message.to_dict())
    for call in message.tool_calls or []:
        assert call.type == "function"
        given = json.loads(call.function.arguments)
        result = FUNCTIONS[call.function.name](**given)
        print(f"{call.function.name}({given}) -> {result}")
        messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})

    answer = client.chat.completions.create(model=name, messages=messages, temperature=0, max_tokens=60, stream=True)
    for chunk in answer:
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
