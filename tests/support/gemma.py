"""A model that speaks as Gemma 4 does: a template with all that its own has, and the built-in model with the tokens for
it."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken

from moeflux.text.speech import GEMMA_MARKS
from moeflux.text.tokenizer import Tokenizer
from support.remade import remade
from support.vocabularies import byte_level

__all__ = ["TEMPLATE", "model_folder", "tokenizer"]

TEMPLATE = r"""{#- Takes `enable_thinking`. -#}
{%- macro value(it) -%}
  {%- if it is none -%}null
  {%- elif it is string -%}{{ '<|"|>' + it + '<|"|>' }}
  {%- elif it is boolean -%}{{ "true" if it else "false" }}
  {%- elif it is mapping -%}
    {%- for name, each in it | dictsort -%}
      {{ "{" if loop.first else "," }}{{ name }}:{{ value(each) }}{{ "}" if loop.last }}
    {%- endfor -%}
    {{ "{}" if not it }}
  {%- elif it is sequence -%}
    [{%- for each in it -%}{{ value(each) }}{{ "," if not loop.last }}{%- endfor -%}]
  {%- else -%}{{ it }}{%- endif -%}
{%- endmacro -%}
{%- macro without_thoughts(text) -%}
  {%- for part in text.split("<channel|>") -%}{{ part.split("<|channel>")[0] }}{%- endfor -%}
{%- endmacro -%}
{%- set thinks = enable_thinking | default(false) -%}
{%- set said = messages -%}
{%- if thinks or tools or messages[0].role == "system" -%}
  {{- "<|turn>system\n" + ("<|think|>\n" if thinks else "") -}}
  {%- if messages[0].role == "system" -%}
    {{- messages[0].content | trim -}}{%- set said = messages[1:] -%}
  {%- endif -%}
  {%- for tool in tools or [] -%}
    {%- set f = tool.function -%}
    {{- "<|tool>declaration:" + f.name + "{description:" + value(f.description) + ",parameters:{properties:{" -}}
    {%- for name, each in (f.parameters.properties or {}) | dictsort -%}
      {{- name + ":{type:" + value(each.type | upper) + ("},") }}
    {%- endfor -%}
    {{- "}}}<tool|>" -}}
  {%- endfor -%}
  {{- "<turn|>\n" -}}
{%- endif -%}
{%- set at = namespace(user=-1, role=none, kind=none) -%}
{%- for message in said -%}{%- if message.role == "user" -%}{%- set at.user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for message in said -%}{%- if message.role != "tool" -%}
  {%- set at.kind = none -%}
  {%- if not (message.role == "assistant" and at.role == "assistant") -%}
    {{- "<|turn>" + ("model" if message.role == "assistant" else message.role) + "\n" -}}
  {%- endif -%}
  {%- if message.reasoning_content and loop.index0 > at.user -%}
    {{- "<|channel>thought\n" + message.reasoning_content + "\n<channel|>" -}}
  {%- endif -%}
  {%- for call in message.tool_calls or [] -%}
    {%- if call.function.arguments is not mapping -%}{{- raise_exception("Expected an object.") -}}{%- endif -%}
    {{- "<|tool_call>call:" + call.function.name + value(call.function.arguments) + "<tool_call|>" -}}
    {%- set at.kind = "call" -%}
  {%- endfor -%}
  {%- for result in message.tool_responses or [] -%}
    {{- "<|tool_response>response:" + result.name + "{value:" + value(result.response) + "}<tool_response|>" -}}
    {%- set at.kind = "result" -%}
  {%- endfor -%}
  {%- set text = without_thoughts(message.content) | trim if message.role == "assistant" else message.content | trim -%}
  {{- text -}}
  {%- set next = said[loop.index].role if not loop.last else none -%}
  {%- if at.kind == "call" -%}{{- "<|tool_response>" -}}
  {%- elif message.role == "assistant" and next == "assistant" -%}
  {%- elif text or at.kind != "result" or next -%}{{- "<turn|>\n" -}}
  {%- endif -%}
  {%- set at.role = message.role -%}
{%- endif -%}{%- endfor -%}
{%- if add_generation_prompt -%}
  {%- if at.kind == "result" -%}{{- "<|channel>thought\n" if thinks -}}
  {%- elif at.kind != "call" -%}{{- "<|turn>model\n" + ("" if thinks else "<|channel>thought\n<channel|>") -}}
  {%- endif -%}
{%- endif -%}
"""
OTHERS = ("<turn|>", "<|turn>", "<|think|>", "<|tool>", "<tool|>")


def tokenizer() -> Tokenizer:
    """A small one with the marks."""
    whole = byte_level()._whole
    whole.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in (*GEMMA_MARKS, *OTHERS)])
    return Tokenizer(whole)


PLACES = (
    "<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>",
    "</think>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|vision_start|>",
)  # fmt: skip


def model_folder(folder: Path) -> Path:
    """The built-in model with marks in place of tokens that it has."""
    replaced = dict(zip(PLACES, (*OTHERS, *GEMMA_MARKS), strict=True))
    return remade(folder, replaced, ("<turn|>", "<|endoftext|>", "<|tool_response>"), TEMPLATE)
