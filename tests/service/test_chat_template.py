"""Chat templates of downloaded folders: the prompt and its tokens are those of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
from dist_attn_service.completions import chat_template
from dist_attn_service.completions.chat_template import ChatTemplate, TemplateRefusal
from transformers import AutoTokenizer

from dist_attn.errors import ModelFolderError
from dist_attn.text import read_foreign
from tests.support.tokenisers import downloaded_contents

CHATML = """\
{%- for message in messages %}
    {%- if loop.first and message.role != 'system' %}{{ '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}{% endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
HEADERS = """\
{{- bos_token }}
{%- if date_string is not defined %}{% set date_string = strftime_now('%Y') %}{% endif %}
{%- for message in messages %}
    {%- set content = '<|head|>' + message['role'] + '<|headend|>\\n\\n' + message['content'] | trim + '<|eot|>' %}
    {{- content }}
{%- endfor %}
{{- date_string }}
{%- if add_generation_prompt %}{{ '<|head|>assistant<|headend|>\\n\\n' }}{% endif %}"""
STRIPPED = """\
{{ bos_token }}
{% if messages[0]['role'] == 'system' %}
    {% set first = messages[0]['content'] + '\\n\\n' %}
    {% set rest = messages[1:] %}
{% else %}
    {% set first = '' %}
    {% set rest = messages %}
{% endif %}
{% for message in rest %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate') }}
    {% endif %}
<start>{{ 'model' if message['role'] == 'assistant' else message['role'] }}
{{ (first if loop.first else '') + message['content'] | trim }}<end>
{% endfor %}
{% if add_generation_prompt %}
<start>model
{% endif %}"""
TOOLS = """\
{%- if tools %}{{ '<|im_start|>tools\\n' }}
    {%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}{% if message.content %}{{ message.content }}{% endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool>' + call.function.name + ' ' + call.function.arguments | tojson(indent=2) }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}"""
NAMESPACE = """\
{%- set seen = namespace(last=-1, words=[]) %}
{%- for message in messages %}{% if message.role == 'user' %}{% set seen.last = loop.index0 %}{% endif %}{% endfor %}
{%- for message in messages %}
    {%- if loop.index0 == seen.last %}{{ '<|im_start|>last ' }}{% endif %}
    {%- if loop.index0 > 5 %}{% break %}{% endif %}
    {{- message.content.split('</think>')[-1].lstrip('\\n') + eos_token }}
{%- endfor %}
{%- for document in documents or [] %}{{ document.title }}: {{ document['text'] }}{% endfor %}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>' }}{% endif %}"""
GENERATION = """\
{%- for message in messages %}
    {%- if message.role == 'assistant' %}{% generation %}{{ message.content }}{{ eos_token }}{% endgeneration %}
    {%- elif message.role == 'user' %}{{ '<|im_start|>' ~ message.content ~ '<|im_end|>' }}
    {%- else %}{{ message.items() | list | length }}{% endif %}
{%- endfor %}"""
CHAT = [
    {"role": "system", "content": " Answer <b>briefly</b> & well\u00a0 "},
    {"role": "user", "content": "  caf\u00e9 \U0001f642 \u65e5\u672c?\n"},
    {"role": "assistant", "content": "<think>hm</think>\nYes."},
    {"role": "user", "content": "And <tool> now?"},
]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "x": ["<\u00e9>", 1.5, None]}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "\u00fc"}}}
LOOP = [
    *CHAT[:2],
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "3", "tool_call_id": "1"},
]
NAMED = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": TOOLS}]
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|head|>", "<|headend|>", "<|eot|>", "<start>", "<end>")


def test_a_template_for_tools_that_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    """The default is taken; a default that cannot be read is refused."""
    templates = [{"name": "tool_use", "template": "{% if"}, {"name": "default", "template": CHATML}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    made = ChatTemplate.read(tmp_path, {})
    assert made is not None and made.tool_use is None
    templates[1]["template"] = "{% if"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    with pytest.raises(ModelFolderError, match="cannot be read"):
        ChatTemplate.read(tmp_path, {})


@pytest.mark.parametrize(
    ("template", "chat", "more"),
    [
        (CHATML, CHAT[1:], {}),
        (HEADERS, CHAT, {}),
        (STRIPPED, CHAT, {}),
        (TOOLS, LOOP, {"tools": [TOOL, TOOL]}),
        (NAMESPACE, CHAT, {"documents": [{"title": "T", "text": "x"}], "enable_thinking": False}),
        (GENERATION, CHAT, {"add_generation_prompt": False}),
        (NAMED, CHAT[1:], {}),
        (NAMED, LOOP, {"tools": [TOOL]}),
    ],
    ids=["chatml", "headers", "stripped", "tools", "namespace", "generation", "by name", "by name with tools"],
)
@pytest.mark.parametrize("kind", ["llama3", "gemma"])
def test_prompts_are_those_of_transformers(
    kind: str, template: Any, chat: list[dict[str, Any]], more: dict[str, Any], tmp_path: Path
) -> None:
    """The tokens of a rendered chat are those of apply_chat_template, added tokens and blanks included."""
    contents = json.loads(downloaded_contents(kind))
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    first = 1 + max([one["id"] for one in contents["added_tokens"]] + list(contents["model"]["vocab"].values()))
    contents["added_tokens"] += [flags | {"id": first + n, "content": text} for n, text in enumerate(SPECIAL)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(contents))
    named = {"bos_token": contents["post_processor"]["special_tokens"].popitem()[0], "eos_token": "<|eot|>"}
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template, **named}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), read_foreign(tmp_path)
    made = ChatTemplate.read(tmp_path, ours.special_tokens)
    assert made is not None
    told = {"add_generation_prompt": True, **more}
    wanted = theirs.apply_chat_template(chat, tokenize=True, return_dict=False, **told)
    made = made.of(tools="tools" in told)
    assert ours.encode_parts(made.render(chat, **told)).tolist() == wanted


GROWING = "{%- set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x }}"


@pytest.mark.parametrize(
    "template",
    [
        GROWING.replace("START", "'a'").replace("STEP", "ns.x + ns.x"),
        GROWING.replace("START", "'a'").replace("STEP", "ns.x ~ ns.x"),
        GROWING.replace("START", "[1]").replace("STEP", "ns.x + ns.x"),
        GROWING.replace("START", "3").replace("STEP", "ns.x * ns.x"),
        "{{ 'a'.ljust(2000000000) }}",
        "{{ '%2000000000d' % 3 }}",
        "{{ '{:>2000000000}'.format(3) }}",
        "{{ ('a\n' * 1000000) | indent(10000) }}",
        "{{ range(90000) | join('a' * 100000) }}",
        "{{ ('a' * 10000000).join('b' * 10000000) }}",
        "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
        "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
        "{{ [[1]] | tojson(indent=2000000000) }}",
        "{{ ('ab' * 30000000) | list | length }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
)
def test_a_template_that_makes_too_much_is_refused(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loops without an end in sight and values without bounds are refused before they take the memory or the time."""
    monkeypatch.setattr(chat_template, "MOST_SECONDS", 0.2)
    (tmp_path / "chat_template.jinja").write_text(template)
    made = ChatTemplate.read(tmp_path, {})
    assert made is not None
    with pytest.raises(TemplateRefusal, match=r"^it (makes|asks|indents|is not done)"):
        made.render(CHAT)
