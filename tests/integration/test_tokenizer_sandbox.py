"""Templates of requests run in a child process: these tests start real ones."""

from threading import Thread

import pytest

from kvmesh.clock import SystemClock
from kvmesh.errors import InvalidRequestError, MeshError, RequestTooLargeError, UnavailableError
from kvmesh.host.config import ModelConfig
from kvmesh.rpc.clients import encode
from kvmesh.rpc.config import RpcConfig
from kvmesh.rpc.peer import Peer
from kvmesh.testing.mesh import mesh
from kvmesh.testing.tokenizer_folders import byte_level_folder
from kvmesh.types import ChatMessage, ChatPrompt, Context, Role, Worker
from services.tokenizer.app import app
from services.tokenizer.config import LimitsConfig, TokenizerConfig
from services.tokenizer.rendering import Rendering, render
from services.tokenizer.sandbox import MAX_TEMPLATE_CHARS, TemplateSandbox

GIVEN = Rendering(
    [{"role": "user", "content": "größe \ue000 🙂"}],
    tools=[{"b": 2**53 + 1, "a": [1, None, 1.5]}],
    variables={"eos_token": "<|im_end|>", "mood": {"z": 1, "a": True}},
)


@pytest.fixture(scope="module")
def sandbox():
    with TemplateSandbox(seconds=60, max_chars=10_000) as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def hurried():
    with TemplateSandbox(seconds=2, max_chars=10_000) as sandbox:
        yield sandbox


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}",
        "{{ tools | tojson }}{{ mood | tojson(indent=2) }}{{ eos_token }}",
        "{%- if add_generation_prompt %}\n  open\n{% endif -%}  x",
        "{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
        "{% generation %}{{ messages[0].content }}{% endgeneration %}",
        "",
    ],
)
def test_a_template_gives_what_it_gives_in_the_process_itself(sandbox, template):
    assert sandbox.render(template, GIVEN) == render(template, GIVEN)


def test_the_last_message_can_be_left_open(sandbox):
    given = Rendering(GIVEN.messages, add_generation_prompt=False, continue_final_message=True)
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    assert sandbox.render(template, given) == render(template, given) == "<größe \ue000 🙂"


@pytest.mark.parametrize(
    ("template", "words", "field"),
    [
        ("{% for %}", "broken", "chat_template"),
        ("{{ x | no_such_filter }}", "broken", "chat_template"),
        ("{% for x in messages %}" * 30 + "{% endfor %}" * 30, "broken", "chat_template"),
        ("{{ raise_exception('roles must alternate') }}", "must alternate", "messages"),
        ("{{ messages.pop() }}", "cannot render", "messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "cannot render", "messages"),
        ("{{ cycler.__init__.__globals__.os }}", "cannot render", "messages"),
        ("{% for i in range(10**9) %}x{% endfor %}", "cannot render", "messages"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses", "chat_template"),
        ("{{ 'x' * 10**10 }}", "memory", "chat_template"),
        (
            "{% set n = namespace(x='xxxxxxxx') %}"
            "{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
            "memory",
            "chat_template",
        ),
    ],
)
def test_what_a_template_may_not_do_is_a_bad_request(sandbox, template, words, field):
    with pytest.raises(InvalidRequestError, match=words) as caught:
        sandbox.render(template, GIVEN)
    assert caught.value.field == field
    assert sandbox.render("ok", GIVEN) == "ok"


ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        ENDLESS,
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(60) }}",
    ],
    ids=["loops", "macros"],
)
def test_a_template_that_takes_too_long_is_ended(hurried, template):
    with pytest.raises(InvalidRequestError, match="more than 2 s") as caught:
        hurried.render(template, GIVEN)
    assert caught.value.field == "chat_template"
    assert hurried.render("ok", GIVEN) == "ok"


def test_long_templates_and_long_outputs_are_refused(sandbox):
    for template in ("x" * (MAX_TEMPLATE_CHARS + 1), "{{ 'x' * 10001 }}"):
        with pytest.raises(RequestTooLargeError) as caught:
            sandbox.render(template, GIVEN)
        assert caught.value.field == "chat_template"
    assert sandbox.render("x" * 10_000, GIVEN) == "x" * 10_000


def test_several_threads_each_get_their_own_prompt(sandbox):
    answers = {}
    threads = [
        Thread(target=lambda n=n: answers.update({n: sandbox.render(f"number {n}", GIVEN)}))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {n: f"number {n}" for n in range(8)}


def test_leaving_ends_what_runs():
    errors = []

    def work():
        with pytest.raises(MeshError) as caught:
            sandbox.render(ENDLESS, GIVEN)
        errors.append(caught.value)

    with TemplateSandbox(seconds=600, max_chars=10) as sandbox:
        child = sandbox._child
        thread = Thread(target=work)
        thread.start()
        while not sandbox._lock.locked():
            thread.join(0.01)
    thread.join()
    assert len(errors) == 1
    assert child.returncode is not None
    with pytest.raises(UnavailableError):
        sandbox.render("x", GIVEN)


@pytest.mark.parametrize("allowed", [True, False])
async def test_the_service_takes_templates_of_requests_where_the_operator_allows_it(
    tmp_path, allowed
):
    config = TokenizerConfig(
        model=ModelConfig(path=byte_level_folder(tmp_path), name="little"),
        tokenizer=LimitsConfig(allow_request_templates=allowed),
    )
    messages = (ChatMessage("user", "hi<|im_end|>"),)
    prompt = ChatPrompt(messages, template="<|im_start|>{{ messages[0].content }}")
    async with mesh() as running:
        node = await running.start(Role.TOKENIZER, app, config)
        worker = Worker(node.member.id, node.member.epoch, node.member.address)
        peer = Peer(worker, "test", RpcConfig())
        try:
            asked = encode(peer, prompt, "little", 0, Context("r1"), SystemClock())
            if allowed:
                assert [id_ for id_ in (await asked).token_ids if id_ < 4] == [1]
            else:
                with pytest.raises(InvalidRequestError, match="not allowed") as caught:
                    await asked
                assert caught.value.field == "chat_template"
        finally:
            await peer.aclose()
