"""Images in chats, responses and on the command line: the texts of `LLM.generate`; what is refused."""

import base64
from io import BytesIO

import httpx2
import pytest
from PIL import Image

from conftest import serving
from secondguess import load
from secondguess.engine import Engine
from secondguess.server.settings import ServerSettings
from test_images import asked, image

MAX_TOKENS = 8
TEXT = "def quicksort(items):"


def png(picture):
    stream = BytesIO()
    picture.save(stream, "PNG")
    return stream.getvalue()


def data_url(content):
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


@pytest.fixture(scope="module")
def served(tmp_path_factory, llava_checkpoint):
    """The models, a client of their server, and the folder of its images."""
    folder = tmp_path_factory.mktemp("outer") / "images"
    folder.mkdir()
    (folder / "one two.png").write_bytes(png(image(1)))
    (folder.parent / "secret.png").write_bytes(png(image(1)))
    (folder / "link.png").symlink_to(folder.parent / "secret.png")
    llm = load(llava_checkpoint, "suffix", dtype="float32", device="cpu")
    engine = Engine(llm)
    settings = ServerSettings(model_names=("llava",), image_folder=folder, max_images=2, max_image_pixels=700)
    with serving(engine, settings) as url, httpx2.Client(base_url=url, timeout=20) as http:
        yield llm, http, folder
    engine.close()


def chat(http, *urls, path="/v1/chat/completions", **fields):
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": TEXT}]}]
    return http.post(path, json={"model": fields.pop("model", "llava"), "messages": messages, **fields})


@pytest.mark.parametrize("speculation", ["auto", "off"])
def test_an_image_gives_the_text_of_generate(served, speculation):
    llm, http, _ = served
    expected = [llm.generate(asked(image(seed)), max_tokens=MAX_TOKENS).text for seed in (1, 2)]
    assert expected[0] != expected[1]
    settings = {"temperature": 0, "max_tokens": MAX_TOKENS, "speculation": speculation}
    replies = [chat(http, data_url(png(image(seed))), **settings).json() for seed in (1, 2)]
    assert [reply["choices"][0]["message"]["content"] for reply in replies] == expected
    from_file = chat(http, "file:one%20two.png", **settings).json()
    assert from_file["choices"][0]["message"]["content"] == expected[0]
    assert (
        from_file["usage"]["prompt_tokens"]
        == chat(http, "file:one two.png", path="/tokenize").json()["count"]
    )


def test_a_response_takes_images(served):
    llm, http, _ = served
    expected = llm.generate(asked(image(1)), max_tokens=MAX_TOKENS).text
    parts = [
        {"type": "input_image", "image_url": data_url(png(image(1)))},
        {"type": "input_text", "text": TEXT},
    ]
    body = {"model": "llava", "input": [{"role": "user", "content": parts}], "temperature": 0}
    reply = http.post("/v1/responses", json=body | {"max_output_tokens": MAX_TOKENS}).json()
    assert reply["output"][0]["content"][0]["text"] == expected
    body["input"][0]["role"] = "system"
    assert http.post("/v1/responses", json=body).json()["error"]["param"] == "input"


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        (["http://localhost/x.png"], "got 'http://localhost/x.png', which this server does not read"),
        (["file:../secret.png"], "below the server's folder"),
        (["file:link.png"], "below the server's folder"),
        (["file:///etc/passwd"], "below the server's folder"),
        (["file:none.png"], "below the server's folder"),
        (["file:\0"], "below the server's folder"),
        (["data:image/png;base64,???"], "in base64"),
        (["data:image/png,abc"], "in base64"),
        ([data_url(png(image(1))[:-60])], "cannot be read"),
        ([data_url(b"<svg/>")], "cannot be read"),
        ([data_url(png(Image.new("RGB", (9000, 9000))))], "700 pixels, got 9000 x 9000"),
        ([data_url(png(Image.new("RGB", (10, 10))))] * 3, "at most 2 images"),
        ([data_url(png(image(1)))] * 2, "at most 316 pixels, got 24 x 16"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_other_images_are_refused_by_name(served, urls, message):
    error = chat(served[1], *urls)
    assert error.status_code == 400
    found = error.json()["error"]
    assert found["param"] == "messages"
    assert message in found["message"]


def test_files_are_refused_without_a_folder_and_images_by_a_model_of_text(http):
    """The image is not even decoded."""
    for url in ("file:x.png", data_url(b"no image")):
        reply = chat(http, url, model="builtin")
        assert reply.status_code == 400
        assert "images are taken by gemma3" in reply.json()["error"]["message"]


def test_the_command_line_takes_images(secondguess_command, served, llava_checkpoint):
    llm, _, folder = served
    options = ["--max-tokens", MAX_TOKENS, "--model", llava_checkpoint, "--dtype", "float32"]
    done = secondguess_command("generate", TEXT, "--image", folder / "one two.png", "--json", *options)
    assert done.records[0]["text"] == llm.generate(asked(image(1)), max_tokens=MAX_TOKENS).text
    broken = folder / "broken.png"
    broken.write_bytes(b"no image")
    for path, message in ((broken, "that cannot be read"), (folder / "none.png", "expected a readable file")):
        done = secondguess_command("generate", TEXT, "--image", path)
        assert (done.code, done.err.count("\n")) == (2, 1)
        assert message in done.err
    done = secondguess_command("generate", "--prompt-file", "x", "--image", broken)
    assert (done.code, "expected a PROMPT together with --image" in done.err) == (2, True)
