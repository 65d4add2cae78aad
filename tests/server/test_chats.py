"""`/v1/chat/completions` with OpenAI's client: messages, streams, log-probabilities, refused fields."""

import openai
import pytest
from fake_engine import LOGPROB, REPLY, FakeEngine

from conftest import openai_client, serving
from secondguess.server.settings import ServerSettings

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Add two numbers."}]


def chat(client, **fields):
    return client.chat.completions.create(**{"model": "builtin", "messages": MESSAGES, **fields})


def prompt_text(engine):
    return engine.llm.target.tokenizer.decode(engine.last_prompt)


def test_the_built_in_model_has_a_minimal_chat_template(client, engine):
    reply = chat(client)
    assert reply.object == "chat.completion"
    (choice,) = reply.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", REPLY, "stop")
    assert prompt_text(engine) == "# system: Be brief.\n# user: Add two numbers.\n\n"


def test_content_parts_and_developer_messages_are_text_for_the_template(client, engine):
    parts = [{"type": "text", "text": "Add "}, {"type": "text", "text": "two."}]
    chat(client, messages=[{"role": "developer", "content": "Short."}, {"role": "user", "content": parts}])
    assert prompt_text(engine) == "# system: Short.\n# user: Add two.\n\n"


def test_an_earlier_reply_can_be_sent_back_as_it_came(client, engine):
    reply = chat(client).choices[0].message
    first = prompt_text(engine)
    chat(client, messages=[*MESSAGES, reply, {"role": "user", "content": "Thanks."}])
    assert prompt_text(engine) == f"{first}{reply.content}\n# user: Thanks.\n\n"


def test_a_stream_gives_the_same_message(client):
    chunks = list(chat(client, stream=True, n=2))
    for index in range(2):
        choices = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert [choice.delta.role for choice in choices if choice.delta.role] == ["assistant"]
        assert "".join(choice.delta.content or "" for choice in choices) == REPLY
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]


def test_logprobs_are_the_same_in_a_stream(client):
    whole = chat(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert {each.logprob for each in whole} == {LOGPROB}
    assert all(len(each.top_logprobs) == 2 for each in whole)
    assert bytes(whole[0].bytes).decode() == whole[0].token
    parts = [chunk.choices[0].logprobs for chunk in chat(client, logprobs=True, top_logprobs=2, stream=True)]
    assert [each for part in parts if part for each in part.content] == whole
    assert all(not each.top_logprobs for each in chat(client, logprobs=True).choices[0].logprobs.content)


def test_both_names_of_the_limit_work_but_not_different_values(client, engine):
    for name in ("max_tokens", "max_completion_tokens"):
        assert chat(client, **{name: 3}).usage.completion_tokens == 3
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, max_tokens=3, max_completion_tokens=4)
    assert caught.value.param == "max_tokens"


def test_sampling_settings_reach_the_engine(client, engine):
    chat(
        client,
        temperature=0.7,
        top_p=0.9,
        frequency_penalty=0.5,
        presence_penalty=-0.5,
        seed=11,
        stop=["x", "y"],
        logit_bias={"5": -100},
        extra_body={
            "top_k": 40,
            "min_p": 0.1,
            "repetition_penalty": 1.2,
            "min_tokens": 2,
            "stop_token_ids": [9],
            "ignore_eos": True,
        },
    )
    params = engine.last.params
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.7, 0.9, 40, 0.1)
    assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (0.5, -0.5, 1.2)
    assert (params.seed, params.stop, dict(params.logit_bias)) == (11, ("x", "y"), {5: -100.0})
    assert (params.min_tokens, params.stop_token_ids, params.ignore_eos) == (2, (9,), True)


def test_habits_of_clients_of_vllm_are_accepted(http, engine):
    """`top_k` -1 for none, and no model, as only one is served."""
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "top_k": -1}
    reply = http.post("/v1/chat/completions", json=body).json()
    assert engine.last.params.top_k == 0
    assert reply["model"] == chat_model(http)
    reply = http.post("/v1/responses", json={"input": "x", "max_output_tokens": 2}).json()
    assert reply["model"] == chat_model(http)


def chat_model(http):
    return http.get("/v1/models").json()["data"][0]["id"]


def test_metadata_comes_back(client):
    assert chat(client, metadata={"purpose": "test"}).metadata == {"purpose": "test"}


def test_messages_that_the_template_refuses_are_an_error_of_the_client():
    settings = ServerSettings(chat_template="{{ raise_exception('roles must alternate') }}")
    with (
        serving(FakeEngine(), settings) as url,
        openai_client(url) as client,
        pytest.raises(openai.UnprocessableEntityError, match="roles must alternate"),
    ):
        chat(client)


def test_a_reply_that_was_cut_is_continued(client, engine):
    beginning = {"role": "assistant", "content": "def add("}
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    chat(client, messages=[*MESSAGES, beginning], extra_body=fields)
    assert prompt_text(engine) == "# system: Be brief.\n# user: Add two numbers.\n\ndef add("
    chat(client, messages=[*MESSAGES, beginning], extra_body={"continue_final_message": True})
    assert prompt_text(engine).endswith("\n\ndef add(")
    chat(client, messages=[*MESSAGES, beginning])
    assert prompt_text(engine).startswith("# system: Be brief.\n# user: Add two numbers.\n\ndef add(\n")


def test_the_last_spaces_of_a_reply_that_is_continued_are_kept(client, engine):
    source = engine.llm.target.tokenizer.chat_template
    engine.llm.target.tokenizer.chat_template = (
        "{% for message in messages %}[{{ message.content | trim }}]{% endfor %}"
    )
    try:
        beginning = {"role": "assistant", "content": "Sure:\n\n"}
        chat(client, messages=[*MESSAGES, beginning], extra_body={"continue_final_message": True})
        assert prompt_text(engine) == "[Be brief.][Add two numbers.][Sure:\n\n"
    finally:
        engine.llm.target.tokenizer.chat_template = source


def test_a_template_that_reads_parts_continues_a_reply(client, engine):
    source = engine.llm.target.tokenizer.chat_template
    parts = "{% for part in message.content %}{{ part.text }}{% endfor %}"
    template = "{% for message in messages %}[PARTS]{% endfor %}".replace("PARTS", parts)
    engine.llm.target.tokenizer.chat_template = template
    try:
        beginning = {"role": "assistant", "content": "Sure: "}
        chat(client, messages=[*MESSAGES, beginning], extra_body={"continue_final_message": True})
        assert prompt_text(engine) == "[Be brief.][Add two numbers.][Sure: "
    finally:
        engine.llm.target.tokenizer.chat_template = source


@pytest.mark.parametrize(
    ("last", "fields"),
    [
        ({"role": "user", "content": "x"}, {}),
        ({"role": "assistant", "content": " "}, {}),
        ({"role": "assistant", "content": "x"}, {"add_generation_prompt": True}),
    ],
)
def test_only_a_text_of_the_assistant_is_continued(client, last, fields):
    with pytest.raises(openai.BadRequestError, match="continue_final_message"):
        chat(client, messages=[*MESSAGES, last], extra_body={"continue_final_message": True, **fields})


def test_a_prompt_may_end_with_the_last_message(client, engine):
    engine.llm.target.tokenizer.chat_template, source = (
        "{% for message in messages %}[{{ message.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}",
        engine.llm.target.tokenizer.chat_template,
    )
    try:
        chat(client)
        assert prompt_text(engine) == "[Be brief.][Add two numbers.]>"
        chat(client, extra_body={"add_generation_prompt": False})
        assert prompt_text(engine) == "[Be brief.][Add two numbers.]"
    finally:
        engine.llm.target.tokenizer.chat_template = source
