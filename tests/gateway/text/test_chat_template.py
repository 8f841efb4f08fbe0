"""Chat templates render what `transformers` renders."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from services.gateway.text.chat_template import ChatTemplate, TemplateError, load_chat_template
from services.gateway.text.tokenizer import Tokenizer, load_tokenizer
from services.protocol.model_files.base import ModelError
from services.protocol.model_files.open import open_model
from tests.gateway.tokenizer_files import CHATML, byte_level, write

LLAMA3 = """\
{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

QWEN3 = """\
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and message.content is string %}
        {%- set ns.last_query_index = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index or keep_thinking is true %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- message.content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + message.content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

# A generation tag, tojson of what HTML would escape, loop controls and whitespace control in one.
ODD = """\
{{ bos_token }}{% for message in messages %}
    {% if message['role'] == 'system' %}{% continue %}{% endif %}
    {{ message | tojson }}
    {{ message.content | tojson(indent=2) }}
{% generation %}
[{{ message['content'] | upper }}]
{% endgeneration %}
{% endfor %}
{% if unk_token is defined %}unk{% endif %}{{ eos_token }}
"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "qwen3": QWEN3, "odd": ODD}

CHATS: dict[str, list[dict[str, str]]] = {
    "one turn": [{"role": "user", "content": "Hello <b>wörld</b> & 日本 \"quoted\" 'x'\n"}],
    "system": [{"role": "system", "content": " Be brief. "}, {"role": "user", "content": "Hi"}],
    "several turns": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "One"},
        {"role": "assistant", "content": "\n\nTwo", "reasoning_content": "\nhm\n"},
        {"role": "user", "content": "Three"},
    ],
    "answered": [{"role": "user", "content": "One"}, {"role": "assistant", "content": "Two ", "reasoning": "because"}],
}


@pytest.fixture(scope="module", params=sorted(TEMPLATES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    template = TEMPLATES[request.param]
    return write(directory, byte_level(), chat_template=template, bos_token="<|bos|>", eos_token="<|eos|>")


@pytest.fixture(scope="module")
def oracle(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return load_tokenizer(open_model(model))


@pytest.fixture(scope="module")
def template(model: Path, tokenizer: Tokenizer) -> ChatTemplate:
    template = load_chat_template(open_model(model), tokenizer.special_tokens)
    assert template is not None
    return template


@pytest.mark.parametrize(
    "kwargs", [{}, {"enable_thinking": False, "date_string": "1 Jan 2030"}], ids=["plain", "kwargs"]
)
@pytest.mark.parametrize("chat", CHATS)
async def test_prompt_is_what_transformers_makes(
    oracle: Any, tokenizer: Tokenizer, template: ChatTemplate, chat: str, kwargs: dict[str, Any]
):
    """Text and token ids; so a BOS that the template writes is not doubled."""
    for prompted in (True, False):
        expected = oracle.apply_chat_template(CHATS[chat], tokenize=False, add_generation_prompt=prompted, **kwargs)
        text = template.render(CHATS[chat], add_generation_prompt=prompted, kwargs=kwargs)
        assert text == expected
        ids = oracle.apply_chat_template(CHATS[chat], add_generation_prompt=prompted, return_dict=False, **kwargs)
        assert (tokenizer.encode(text, add_special_tokens=False)).tolist() == ids


def test_last_message_is_continued_as_in_transformers(oracle: Any, template: ChatTemplate, model: Path):
    if "odd" in model.name:
        chat = [{"role": "assistant", "content": "TWO "}]  # its template writes in capitals
    else:
        chat = CHATS["answered"]
    expected = oracle.apply_chat_template(chat, tokenize=False, continue_final_message=True)
    assert template.render(chat, add_generation_prompt=False, continue_final_message=True) == expected


def test_template_file_comes_before_the_config(tmp_path: Path):
    write(tmp_path, byte_level(), chat_template="config")
    (tmp_path / "chat_template.jinja").write_text("file {{ messages[0].content }}")
    template = load_chat_template(open_model(tmp_path), {})
    assert template is not None
    assert template.render([{"role": "user", "content": "x"}]) == "file x"


def test_a_file_takes_the_place_of_the_models_template(tmp_path: Path):
    write(tmp_path, byte_level(), chat_template="the model's")
    (tmp_path / "own.jinja").write_text("own {{ messages[0].content }}")
    template = load_chat_template(open_model(tmp_path), {}, str(tmp_path / "own.jinja"))
    assert template is not None
    assert template.render([{"role": "user", "content": "x"}]) == "own x"
    with pytest.raises(ModelError, match="cannot be read"):
        load_chat_template(open_model(tmp_path), {}, str(tmp_path / "missing.jinja"))


def test_a_model_without_a_template_takes_those_of_requests_where_they_are_trusted(tmp_path: Path):
    write(tmp_path, byte_level())
    template = load_chat_template(open_model(tmp_path), {}, replaceable=True)
    assert template is not None
    messages = [{"role": "user", "content": "x"}]
    with pytest.raises(TemplateError, match="send one"):
        template.render(messages)
    assert template.replaceable


def test_default_of_several_named_templates(tmp_path: Path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    write(tmp_path, byte_level(), chat_template=named)
    template = load_chat_template(open_model(tmp_path), {})
    assert template is not None
    assert template.render([{"role": "user", "content": "x"}]) == "plain"


@pytest.mark.parametrize("as_files", [False, True], ids=["a list", "files"])
def test_requests_with_tools_have_a_template_of_their_own(tmp_path: Path, as_files: bool):
    """The same one that `transformers` takes."""
    named = {"default": "plain {{ messages[0].content }}", "tool_use": "{{ tools | tojson }} {{ messages[0].content }}"}
    write(tmp_path, byte_level(), chat_template=[{"name": name, "template": text} for name, text in named.items()])
    if as_files:
        theirs = AutoTokenizer.from_pretrained(tmp_path)
        for path in tmp_path.glob("tokenizer*"):
            path.unlink()
        theirs.save_pretrained(tmp_path)
        assert (tmp_path / "additional_chat_templates" / "tool_use.jinja").is_file()
    template = load_chat_template(open_model(tmp_path), {})
    assert template is not None
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    messages: Any = [{"role": "user", "content": "x"}]
    tools: Any = [{"type": "function", "function": {"name": "f"}}]
    assert template.render(messages) == theirs.apply_chat_template(messages, tokenize=False)
    expected = theirs.apply_chat_template(messages, tools=tools, tokenize=False)
    assert template.with_tools.render(messages, tools=tools) == expected
    assert '"f"' in expected


def test_a_template_of_the_operator_is_for_all_requests(tmp_path: Path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    write(tmp_path, byte_level(), chat_template=named)
    (tmp_path / "own.jinja").write_text("own")
    template = load_chat_template(open_model(tmp_path), {}, str(tmp_path / "own.jinja"))
    assert template is not None
    assert template.with_tools is template


def test_model_without_template(tmp_path: Path):
    assert load_chat_template(open_model(write(tmp_path, byte_level())), {}) is None


def test_template_with_a_syntax_error_names_its_line(tmp_path: Path):
    write(tmp_path, byte_level(), chat_template="fine\n{% for %}")
    with pytest.raises(ModelError, match="line 2"):
        load_chat_template(open_model(tmp_path), {})


def test_refusal_of_a_template_reaches_the_client():
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(TemplateError, match="roles must alternate"):
        template.render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].missing.name }}",
    ],
)
def test_template_cannot_break_out_or_crash(source: str):
    """An error inside a template is a TemplateError without a traceback."""
    with pytest.raises(TemplateError) as caught:
        ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])
    assert "Traceback" not in str(caught.value)


def test_special_tokens_come_as_strings_or_objects(tmp_path: Path):
    write(tmp_path, byte_level(), bos_token={"content": "<|bos|>", "special": True}, pad_token=None)
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|eos|>", "bos_token": "other"}')
    assert load_tokenizer(open_model(tmp_path)).special_tokens == {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
