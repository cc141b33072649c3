"""A model that speaks in channels, as gpt-oss does: a template with all that its own has, and the built-in model with
the tokens for it."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken

from moeflux.text.channels import MARKS
from moeflux.text.tokenizer import Tokenizer
from support.remade import remade
from support.vocabularies import byte_level

__all__ = ["TEMPLATE", "model_folder", "tokenizer"]

TEMPLATE = r"""{#- Takes `builtin_tools`, `model_identity` and `reasoning_effort`. -#}
{%- macro kind(spec, required, is_nullable=false) -%}
  {%- if spec.type == "array" -%}
    {%- if spec['items'] -%}
      {%- if spec['items']['type'] in ["string", "boolean"] -%}{{- spec['items']['type'] + "[]" }}
      {%- elif spec['items']['type'] in ["number", "integer"] -%}{{- "number[]" }}
      {%- else -%}
        {%- set inner = kind(spec['items'], required) -%}
        {{- "any[]" if inner == "object | object" or inner|length > 50 else inner + "[]" }}
      {%- endif -%}
    {%- else -%}{{- "any[]" }}{%- endif -%}
    {%- if spec.nullable -%}{{- " | null" }}{%- endif -%}
  {%- elif spec.type is defined and spec.type is iterable and spec.type is not string and spec.type is not mapping
      and spec.type[0] is defined -%}
    {{- spec.type|join(" | ") if spec.type|length > 1 else spec.type[0] }}
  {%- elif spec.oneOf -%}
    {%- for variant in spec.oneOf -%}
      {{- kind(variant, required) -}}
      {%- if variant.default is defined %}{{- "// default: " + variant.default|tojson }}{%- endif -%}
      {%- if not loop.last %}{{- " | " }}{% endif -%}
    {%- endfor -%}
  {%- elif spec.type == "string" -%}
    {%- if spec.enum -%}{{- '"' + spec.enum|join('" | "') + '"' -}}
    {%- else -%}{{- "string" }}{%- if spec.nullable %}{{- " | null" }}{%- endif -%}{%- endif -%}
  {%- elif spec.type in ["number", "integer"] -%}{{- "number" }}
  {%- elif spec.type == "boolean" -%}{{- "boolean" }}
  {%- elif spec.type == "object" -%}
    {%- if spec.properties -%}
      {{- "{\n" }}
      {%- for name, each in spec.properties.items() -%}
        {{- name -}}{%- if name not in (spec.required or []) -%}{{- "?" }}{%- endif -%}{{- ": " }}
        {{ kind(each, spec.required or []) }}
        {%- if not loop.last -%}{{-", " }}{%- endif -%}
      {%- endfor -%}
      {{- "}" }}
    {%- else -%}{{- "object" }}{%- endif -%}
  {%- else -%}{{- "any" }}{%- endif -%}
{%- endmacro -%}

{%- macro namespace_of(space, tools) -%}
  {{- "## " + space + "\n\nnamespace " + space + " {\n\n" }}
  {%- for tool in tools %}
    {%- set tool = tool.function %}
    {{- "// " + tool.description + "\ntype " + tool.name + " = " }}
    {%- if tool.parameters and tool.parameters.properties %}
      {{- "(_: {\n" }}
      {%- for name, spec in tool.parameters.properties.items() %}
        {%- if spec.description %}{{- "// " + spec.description + "\n" }}{%- endif %}
        {{- name }}{%- if name not in (tool.parameters.required or []) -%}{{- "?" }}{%- endif -%}
        {{- ": " }}{{- kind(spec, tool.parameters.required or []) }}
        {%- if spec.default is defined -%}
          {%- if spec.enum %}{{- ", // default: " + spec.default }}
          {%- else %}{{- ", // default: " + spec.default|tojson }}{%- endif -%}
        {%- endif -%}
        {{- ",\n" }}
      {%- endfor %}
      {{- "}) => any;\n\n" }}
    {%- else -%}{{- "() => any;\n\n" }}{%- endif -%}
  {%- endfor %}
  {{- "} // namespace " + space }}
{%- endmacro -%}

{%- macro first_message() -%}
  {%- if model_identity is not defined %}{%- set model_identity = "You are a model of tests." %}{%- endif %}
  {{- model_identity + "\nToday: " + strftime_now("%Y-%m-%d") + "\n\n" }}
  {%- if reasoning_effort is not defined %}{%- set reasoning_effort = "medium" %}{%- endif %}
  {{- "Effort: " + reasoning_effort + "\n\n" }}
  {%- if builtin_tools %}
    {%- set known = namespace(browser=false, python=false) %}
    {%- for tool in builtin_tools %}
      {%- if tool == "browser" %}{%- set known.browser = true %}
      {%- elif tool == "python" %}{%- set known.python = true %}{%- endif %}
    {%- endfor %}
    {{- ("## browser\n" if known.browser else "") + ("## python\n" if known.python else "") }}
  {%- endif -%}
  {{- "Channels: analysis, commentary, final." }}
  {%- if tools -%}{{- "\nCalls go to the channel commentary." }}{%- endif -%}
{%- endmacro -%}

{{- "<|start|>system<|message|>" }}{{- first_message() }}{{- "<|end|>" }}
{%- if messages[0].role == "developer" or messages[0].role == "system" %}
  {%- set told = messages[0].content %}{%- set said = messages[1:] %}
{%- else %}
  {%- set told = "" %}{%- set said = messages %}
{%- endif %}
{%- if told or tools %}
  {{- "<|start|>developer<|message|>" }}
  {%- if told %}{{- "# Instructions\n\n" + told + "\n\n" }}{%- endif %}
  {%- if tools -%}{{- "# Tools\n\n" }}{{- namespace_of("functions", tools) }}{%- endif -%}
  {{- "<|end|>" }}
{%- endif %}
{%- set last = namespace(name=none) %}
{%- for message in said -%}
  {%- if message.role == 'assistant' -%}
    {%- for part in [message.content, message.thinking] %}
      {%- if part and ("<|channel|>analysis<|message|>" in part or "<|channel|>final<|message|>" in part) %}
        {{- raise_exception("Expected a text without channels.") }}
      {%- endif %}
    {%- endfor %}
    {%- if "tool_calls" in message %}
      {%- set later = namespace(answered=false) %}
      {%- for other in said[loop.index:] %}
        {%- if other.role == 'assistant' and "tool_calls" not in other %}{%- set later.answered = true %}{%- endif %}
      {%- endfor %}
      {%- set call = message.tool_calls[0] %}
      {%- if call.function %}{%- set call = call.function %}{%- endif %}
      {%- if message.content and message.thinking %}
        {{- raise_exception("Expected a content or a thought beside a call, found both.") }}
      {%- elif (message.content or message.thinking) and not later.answered %}
        {{- "<|start|>assistant<|channel|>analysis<|message|>" + (message.content or message.thinking) + "<|end|>" }}
      {%- endif %}
      {{- "<|start|>assistant to=functions." + call.name + "<|channel|>commentary " }}
      {{- (call.content_type if call.content_type is defined else "json") + "<|message|>" }}
      {{- call.arguments|tojson + "<|call|>" }}
      {%- set last.name = call.name %}
    {%- elif loop.last and not add_generation_prompt %}
      {%- if "thinking" in message %}
        {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.thinking + "<|end|>" }}
      {%- endif %}
      {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|return|>" }}
    {%- elif "thinking" in message %}{#- as some write it, and wrongly #}
      {{- "<|start|>assistant<|channel|>analysis<|message|>" + message.content + "<|end|>" }}
    {%- else %}
      {{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}
      {%- set last.name = none %}
    {%- endif %}
  {%- elif message.role == 'tool' -%}
    {%- if last.name is none %}{{- raise_exception("Expected a call before its result.") }}{%- endif %}
    {{- "<|start|>functions." + last.name + " to=assistant<|channel|>commentary<|message|>" }}
    {{- message.content|tojson + "<|end|>" }}
  {%- elif message.role == 'user' -%}
    {{- "<|start|>user<|message|>" + message.content + "<|end|>" }}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|start|>assistant
{%- endif -%}
"""


def tokenizer() -> Tokenizer:
    """A small one with the marks."""
    whole = byte_level()._whole
    whole.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    return Tokenizer(whole)


REPLACED = {
    "<|im_start|>": "<|start|>", "<|im_end|>": "<|return|>", "<|fim_prefix|>": "<|message|>",
    "<|fim_middle|>": "<|channel|>", "<|fim_suffix|>": "<|constrain|>", "<|vision_start|>": "<|end|>",
    "<|vision_end|>": "<|call|>",
}  # fmt: skip


def model_folder(folder: Path) -> Path:
    """The built-in model with marks in place of tokens that it has."""
    return remade(folder, REPLACED, ("<|return|>", "<|endoftext|>", "<|call|>"), TEMPLATE)
