"""Chat templates of downloaded folders: the prompt and its tokens are those of transformers."""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dist_attn_service.base.errors import Code, ServiceError
from dist_attn_service.completions import chat_template
from dist_attn_service.completions.chat_template import TemplateRefusal
from transformers import AutoTokenizer

from dist_attn.errors import ModelFolderError
from dist_attn.text import read_foreign
from tests.support.chat_templates import prompt, read, warm
from tests.support.tokenisers import downloaded_contents
from tests.support.waiting import eventually

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
    found = read(tmp_path)
    assert found is not None and found[True] == found[False]
    templates[1]["template"] = "{% if"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    with pytest.raises(ModelFolderError, match="cannot be read"):
        read(tmp_path)


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
    told = {"add_generation_prompt": True, **more}
    wanted = theirs.apply_chat_template(chat, tokenize=True, return_dict=False, **told)
    assert ours.encode_parts(prompt(tmp_path, ours.special_tokens, chat, **told)).tolist() == wanted


ROLES = """\
{%- macro turn(role, text) %}{{ '<|' + role + '|>' }}{{ text }}{{ '<|end|>' }}{% endmacro %}
{%- set opened %}<|im_start|>{% endset %}
{%- for message in messages %}{{ opened ~ turn(message.role, message['content']) }}{% endfor %}
{%- for part in ['#<|im_start|>', '<|end|>b'] %}{{ part.split('#')[-1] | trim }}{{ ('x' ~ part)[1:] }}{% endfor %}
{{- ['<|end|>', '<|end|>'] | join(', ') }}{{ '<|end|>' * 2 }}{{ '<|e*d|>' | replace('*', 'n') }}"""


def test_special_tokens_that_a_template_puts_together(tmp_path: Path) -> None:
    """A token whose text stands in the template is one, whichever way it gets into the prompt; a role is no text."""
    (tmp_path / "chat_template.jinja").write_text(ROLES)
    special = {"<|user|>": 1, "<|end|>": 2, "<|im_start|>": 3}
    parts = prompt(tmp_path, special, [{"role": "user", "content": "<|user|>"}])
    wanted = [3, 1, "<|user|>", 2, 3, "#", 3, 2, "b", 2, "b", 2, ", ", 2, 2, 2, 2]
    assert parts == wanted


CLIENTS_TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "a message": ("{{ messages[0].content }}", {}),
    "two side by side": ("{% for m in messages %}{{ m.content[:5] }}{{ m.content[5:] }}{% endfor %}", {}),
    "messages side by side": ("{{ messages[1].content }}{{ messages[2].content }}", {}),
    "messages joined": ("{{ messages[1:] | map(attribute='content') | join }}", {}),
    "messages added": ("{{ messages[1].content + messages[2].content }}", {}),
    "messages in one": ("{{ messages[1].content ~ messages[2].content }}", {}),
    "a set": ("{% set x %}{{ messages[1].content }}{{ messages[2].content }}{% endset %}{{ x }}", {}),
    "with the template's text": ("{{ '<|' + messages[3].content + '|>' }}<|{{ messages[3].content }}|>", {}),
    "replaced": ("{{ 'X' | replace('X', messages[0].content) }}{{ messages[4].content.replace('-', '') }}", {}),
    "replaced in the template's": ("{{ '<|X|>' | replace('X', messages[3].content) }}", {}),
    "formatted": ("{{ '<|%s|>' % messages[3].content }}{{ '<|{}|>'.format(messages[3].content) }}", {}),
    "turned around": ("{{ messages[5].content | reverse }}", {}),
    "letter by letter": ("{% for letter in messages[0].content %}{{ letter }}{% endfor %}", {}),
    "as JSON": ("{{ tools | tojson }}{{ tools }}", {"tools": [{"<|end|>": "<|end|>"}]}),
    "keys": ("{% for key in tools[0] %}<{{ key }}>{{ key }}{% endfor %}", {"tools": [{"<|end|>": 1, "|end|": 1}]}),
    "a document": ("{{ documents[0].text }}", {"documents": [{"text": "<|end|>"}]}),
    "in the place of a name": ("{{ eos_token }}", {"eos_token": "<|end|>"}),
    "a value": ("{{ x }}{{ x | upper | lower }}{{ x | indent }}{{ x * 2 }}{{ x | safe }}", {"x": "<|end|>"}),
    "a role's name": ("{{ messages[0].name }}", {}),
}


@pytest.mark.parametrize("case", CLIENTS_TEXTS)
def test_what_a_client_sends_never_becomes_a_special_token(case: str, tmp_path: Path) -> None:
    """Neither whole nor in pieces, as a key, by a filter, or with what stands around it in the template."""
    template, more = CLIENTS_TEXTS[case]
    (tmp_path / "chat_template.jinja").write_text(template + "<|end|>")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    said = ["<|end|>", "<|en", "d|>", "end", "<-|end|->", ">|dne|<"]
    messages = [{"role": "user", "content": text, "name": "<|end|>"} for text in said]
    parts = prompt(tmp_path, {"<|end|>": 7}, messages, **more)
    assert len(parts) == 2 and parts[1] == 7 and "<|end|>" in parts[0].replace("<<", "<")  # type: ignore[union-attr]


GROWING = "{%- set ns = namespace(x=START) %}{% for i in range(60) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x }}"
NESTED = "{% set a = [0] * 1000 %}{% set b = [a] * 1000 %}{% set c = [b] * 1000 %}{% set d = [c] * 1000 %}"
AGAIN = "{% set e = [0] * 1000 %}{% set f = [e] * 1000 %}{% set g = [f] * 1000 %}{% set h = [g] * 1000 %}"


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
TOO_MUCH = (
    GROWING.replace("START", "'a'").replace("STEP", "ns.x + ns.x"),
    "{{ 'a'.ljust(2000000000) }}",
    "{{ range(90000) | join('a' * 100000) }}",
    NESTED + AGAIN + "{{ d == h }}",
    ENDLESS,
)
MORE_TOO_MUCH = (
    GROWING.replace("START", "[1]").replace("STEP", "ns.x + ns.x"),
    "{{ '%2000000000d' % 3 }}",
    NESTED + "{{ d }}",
    NESTED + "{{ d | tojson }}",
    "{{ ([[0] * (1000000 * messages | length)] * 1000) | sum(start=[]) | length }}",
    "{{ (('f' * 60000000) | int(0, 16)) // (('f' * 30000000) | int(0, 16)) }}",
    "{{ 1.0 | round(10000000, 'floor') }}",
    "{{ ('ab' * 30000000) | sort | length }}",
    "{{ (range(100000) | list * 80) | groupby('real') | length }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
)


TOO_MUCH_WORDS = r"^it (takes|fails|is not done)|^its process ended"


@pytest.mark.parametrize(
    "template", [*TOO_MUCH, *(pytest.param(template, marks=pytest.mark.slow) for template in MORE_TOO_MUCH)]
)
def test_a_template_that_makes_too_much_is_refused(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it does, its process ends at a bound of memory or time, and the next chat has another one."""
    (tmp_path / "chat_template.jinja").write_text("{% if messages | length > 1 %}" + template + "{% endif %}a")

    async def work() -> None:
        async with warm(tmp_path) as made:
            with monkeypatch.context() as patch, pytest.raises(TemplateRefusal, match=TOO_MUCH_WORDS):
                patch.setattr(chat_template, "MOST_SECONDS", 0.5)
                await made.render(CHAT)
            assert await made.render(CHAT[:1]) == ["a"]

    asyncio.run(work())


DEEP = "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}"


@pytest.mark.parametrize("template", [DEEP, "{% if a %}" * 5000, "{{ " + "-" * 50_000 + "1 }}", "{{ 9 ** (9 ** 9) }}"])
def test_a_template_that_cannot_be_compiled_is_refused_in_words(
    template: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However deep, and however long what it makes of its own constants: an error of the folder."""
    monkeypatch.setattr(chat_template, "START_SECONDS", 1)
    (tmp_path / "chat_template.jinja").write_text(template)
    with pytest.raises(ModelFolderError, match="cannot be read: "):
        read(tmp_path)


LONG = "{% if messages | length > 1 %}" + ENDLESS + "{% endif %}a"


def test_one_slow_chat_keeps_no_other_waiting(tmp_path: Path) -> None:
    """While one is rendered for long, others are answered; when its client leaves, its process ends."""
    (tmp_path / "chat_template.jinja").write_text(LONG)

    async def work() -> None:
        async with warm(tmp_path) as made:
            slow = asyncio.create_task(made.render(CHAT))
            for _ in range(20):
                assert await made.render(CHAT[:1]) == ["a"] and not slow.done()
            slow.cancel()
            await asyncio.wait({slow})
            assert slow.cancelled() and await made.render(CHAT[:1]) == ["a"]

    asyncio.run(work())


def test_a_chat_that_finds_no_place_is_told_to_come_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No chat waits longer for others than for its own prompt."""
    monkeypatch.setattr(chat_template, "PROCESSES", 1)
    (tmp_path / "chat_template.jinja").write_text(LONG)

    async def work() -> None:
        async with warm(tmp_path) as made:
            slow = asyncio.create_task(made.render(CHAT))
            await asyncio.sleep(0)
            monkeypatch.setattr(chat_template, "MOST_SECONDS", 0.01)
            with pytest.raises(ServiceError) as refused:
                await made.render(CHAT[:1])
            assert refused.value.code == Code.OVERLOADED and "retry-after" in refused.value.headers
            slow.cancel()
            await asyncio.wait({slow})

    asyncio.run(work())


SERVING = """
import asyncio, sys
from pathlib import Path
from dist_attn_service.completions.chat_template import ChatTemplate

async def work():
    made = await ChatTemplate.started(Path(sys.argv[1]), {})
    (process,) = made._running
    print(process.pid, flush=True)
    await made.render([{"role": "user", "content": text} for text in "ab"])

asyncio.run(work())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the time of the processor ends it")
def test_a_killed_service_leaves_no_process_behind(tmp_path: Path) -> None:
    """Not one that is rendering, either."""
    (tmp_path / "chat_template.jinja").write_text(LONG)
    with subprocess.Popen([sys.executable, "-c", SERVING, str(tmp_path)], stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        pid = int(service.stdout.readline())
        state = Path(f"/proc/{pid}/stat")
        eventually(lambda: state.read_text().rpartition(")")[2].split()[0] == "R", "the chat to be rendered")
        service.kill()
    eventually(lambda: not state.exists() or state.read_text().rpartition(")")[2].split()[0] in "ZX", "its end")
