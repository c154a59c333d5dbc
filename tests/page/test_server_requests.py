"""Who is answered by the server, and what a request may be."""

import json
import queue
import threading

import pytest
from page.live_model import session, tiny
from starlette.testclient import TestClient

from attention_residuals.inference import Engine
from attention_residuals.page.jobs import Jobs
from attention_residuals.page.server import MAX_BODY, application
from attention_residuals.page.session import Session

SECRET = "a-Secret_0"
ORIGIN = "http://127.0.0.1:8000"
JSON = {"content-type": "application/json"}
SECONDS = 20


class Waiting(Session):
    """Its passes last until they may end."""

    def __init__(self):
        super().__init__(Engine(*tiny()), "tiny")
        self.is_running, self.may_end = threading.Event(), threading.Event()

    def first_page(self):
        return session().first_page()

    def work(self, kind, fields):
        def run(check):
            self.is_running.set()
            while not self.may_end.wait(0.001):
                check()
            yield {"type": "done", "kind": kind}

        return run


@pytest.fixture(scope="module")
def answering():
    jobs = Jobs()
    yield application(session(), jobs, secret=SECRET)
    jobs.close()


@pytest.fixture
def client(answering):
    return TestClient(answering, base_url=ORIGIN, headers={"origin": ORIGIN}, follow_redirects=False)


def post(client, kind="trace", headers=None, **fields):
    return client.post(f"/{SECRET}/{kind}", json={"client": "me", **fields}, headers=headers)


def told(response):
    found = response.json()
    assert set(found) == {"got", "expected", "do"}
    assert all(found.values())
    return found


def events(response):
    assert response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


def test_the_page_and_its_answers_come(client):
    page = client.get(f"/{SECRET}/")
    assert page.status_code == 200
    assert page.text.startswith("<!DOCTYPE html>")
    assert client.get(f"/{SECRET}/about").json()["model"] == "tiny"
    *_, last = events(post(client, text="the cat"))
    assert last["type"] == "done"
    kinds = [event["type"] for event in events(post(client, "generate", text="the cat", max_new_tokens=3))]
    assert kinds == ["started", "token", "token", "token", "done"]


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example:8000", "192.168.0.9",
     "", "127.0.0.1:80:80", "[::1", "127.0.0.1@evil.example", "0.0.0.0", "127.0.0.1:x"],
)  # fmt: skip
def test_another_host_is_refused(client, host):
    for response in (
        client.get(f"/{SECRET}/", headers={"host": host}),
        post(client, text="the cat", headers={"host": host, "origin": f"http://{host}"}),
    ):
        assert response.status_code == 403
        assert "Host" in told(response)["got"]


@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost:1", "LOCALHOST", "[::1]:8000", "127.0.0.1"])
def test_this_machine_has_several_names(client, host):
    assert (
        client.get(f"/{SECRET}/about", headers={"host": host, "origin": f"http://{host}"}).status_code == 200
    )


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "null", "", "http://127.0.0.1:8001", "http://localhost:8000", "https://127.0.0.1:8000",
     "http://127.0.0.1:8000.evil.example", "http://127.0.0.1:8000/"],
)  # fmt: skip
def test_another_origin_is_refused(client, origin):
    for path in ("trace", "generate", "compare", "cancel"):
        response = post(client, path, text="the cat", headers={"origin": origin})
        assert response.status_code == 403
        assert "Origin" in told(response)["got"]
    assert client.get(f"/{SECRET}/", headers={"origin": origin}).status_code == 403


def test_a_post_without_an_origin_is_refused(answering):
    bare = TestClient(answering, base_url=ORIGIN)
    assert post(bare, text="the cat").status_code == 403
    assert bare.get(f"/{SECRET}/").status_code == 200


@pytest.mark.parametrize(
    "path",
    ["/", "", "/trace", "/about", f"/{SECRET[:-1]}/", f"/{SECRET}x/", f"/{SECRET.lower()}/", f"//{SECRET}/",
     f"/{SECRET}%00/", "/%ff/", "/é/", "/?" + SECRET, "/favicon.ico"],
)  # fmt: skip
def test_without_the_secret_there_is_no_answer(client, path):
    for response in (client.get(path), client.post(path, json={"client": "me", "text": "the cat"})):
        assert response.status_code == 403
        assert "secret" in told(response)["got"]
        assert SECRET not in response.text


@pytest.mark.parametrize(
    "path",
    ["../../../../etc/passwd", "..%2f..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/etc/passwd", "....//etc/passwd",
     "static/live.js", "assets/live.js", "config.json", "model.safetensors", "tokenizer.json", "/etc/passwd",
     "..\\..\\etc\\passwd", "trace/", "about/x"],
)  # fmt: skip
def test_no_file_is_served(client, path):
    response = client.get(f"/{SECRET}/{path}")
    assert response.status_code in (403, 404, 307)
    assert "root:" not in response.text
    if response.status_code == 307:
        assert response.headers["location"] == f"{ORIGIN}/{SECRET}/trace"
    else:
        told(response)


@pytest.mark.parametrize("kind", ["trace", "generate", "compare", "cancel"])
def test_only_posts_compute(client, kind):
    response = client.get(f"/{SECRET}/{kind}")
    assert response.status_code == 405
    assert told(response)["do"] == "use the page"
    assert client.put(f"/{SECRET}/{kind}", json={}).status_code == 405
    assert client.post(f"/{SECRET}/", json={"client": "me"}).status_code == 405
    preflight = {"access-control-request-method": "POST", "access-control-request-headers": "content-type"}
    assert client.options(f"/{SECRET}/{kind}", headers=preflight).status_code == 405


def test_every_answer_says_what_a_browser_may_do_with_it(client):
    answers = [
        client.get(f"/{SECRET}/"),
        client.get(f"/{SECRET}/about"),
        client.get("/"),
        client.get(f"/{SECRET}/no"),
        client.get(f"/{SECRET}/", headers={"host": "evil.example"}),
        post(client, text="the cat"),
        post(client, text=""),
    ]
    for answer in answers:
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["cache-control"] == "no-store"
        assert answer.headers["x-frame-options"] == "DENY"
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        assert not [name for name in answer.headers if name.startswith("access-control-")]
    assert "'unsafe-inline'" not in answers[1].headers["content-security-policy"]


@pytest.mark.parametrize("size", [MAX_BODY + 1, 40 * MAX_BODY])
def test_an_oversized_request_is_refused(client, size):
    body = json.dumps({"client": "me", "text": "a" * size})
    assert client.post(f"/{SECRET}/trace", content=body, headers=JSON).status_code == 413

    def in_pieces():
        yield body.encode()[:9]
        yield body.encode()[9:]

    response = client.post(f"/{SECRET}/trace", content=in_pieces(), headers=JSON)
    assert response.status_code == 413
    assert "64 KiB" in told(response)["got"]


def test_a_request_of_the_largest_size_is_read(client):
    body = json.dumps({"client": "me", "text": "a" * MAX_BODY})
    whole = body[: MAX_BODY - 2] + body[-2:]
    assert len(whole) == MAX_BODY
    response = client.post(f"/{SECRET}/trace", content=whole, headers=JSON)
    assert response.status_code == 400
    assert "shorten the text" in told(response)["do"]


@pytest.mark.parametrize(
    "body",
    [b"", b"no json", b"[]", b"null", b'"text"', b"[" * 60_000, b'{"a":' * 10_000, b"\xff\xfe", b'{"client": 5}',
     b'{"client": ""}', b'{"text": "a"}', b'{"client": "' + b"x" * 65 + b'"}',
     b'{"client": "me", "text": "a", "seed": 1',
     b'{"client": "me", "text": "a", "seed": ' + b"9" * 5000 + b"}", b'{"client": "me", "text": "a", "seed": 1e}',
     b'{"client": "me", "text": "a", "temperature": 1' + b"0" * 400 + b"}"],
    ids=range(16),
)  # fmt: skip
def test_what_is_no_request_is_refused(client, body):
    for path in ("trace", "cancel"):
        response = client.post(f"/{SECRET}/{path}", content=body, headers=JSON)
        assert response.status_code == 415
        assert "application/json" in told(response)["expected"]


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_json_must_be_called_json(client, kind):
    # What a form of another site can send is never read.
    response = client.post(
        f"/{SECRET}/trace", content=b'{"client": "me", "text": "a"}', headers={"content-type": kind}
    )
    assert response.status_code == 415


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"edits": [{"type": "Dropp"}]}, "did you mean 'Drop'"),
        ({"edits": [{"type": "__import__('os')"}]}, "Drop"),
        ({"edits": 5}, "edits"),
        ({"edits": [[]]}, "edits"),
        ({"seed": 5}, "seed"),
        ({"text": None}, "text"),
        ({"text": "\ud800"}, "surrogate"),
    ],
)
def test_nonsense_is_explained(client, fields, says):
    response = client.post(
        f"/{SECRET}/trace", content=json.dumps({"client": "me", "text": "a", **fields}), headers=JSON
    )
    assert response.status_code == 400
    assert says in " ".join(told(response).values())


def test_an_edit_that_never_fires_is_told(client):
    edit = {"type": "Drop", "sites": "L2.mlp", "sources": "B1", "positions": [50]}
    *_, last = events(post(client, text="the cat", edits=[edit]))
    assert last["type"] == "error"
    assert "never fired" in last["got"]
    assert last["do"]


def test_bound_to_all_addresses_it_answers_to_addresses_and_to_no_other_name():
    jobs = Jobs()
    everywhere = TestClient(application(session(), jobs, secret=SECRET, host="0.0.0.0"), base_url=ORIGIN)
    jobs.close()
    for host, status in (
        ("192.168.0.9:1", 200),
        ("[fe80::1]:1", 200),
        ("evil.example", 403),
        ("a.local", 403),
    ):
        assert everywhere.get(f"/{SECRET}/about", headers={"host": host}).status_code == status


def test_bound_to_a_name_it_answers_to_that_name():
    jobs = Jobs()
    named = TestClient(application(session(), jobs, secret=SECRET, host="Box.local"), base_url=ORIGIN)
    jobs.close()
    for host, status in (("box.local:1", 200), ("192.168.0.9", 403), ("evil.example", 403)):
        assert named.get(f"/{SECRET}/about", headers={"host": host}).status_code == status


def test_it_speaks_http_and_nothing_else(answering):
    with pytest.raises(ValueError, match="websocket"), TestClient(answering).websocket_connect(f"/{SECRET}/"):
        pass


def test_the_page_comes_while_a_pass_runs_and_a_cancel_ends_it():
    waiting, jobs = Waiting(), Jobs()
    busy = TestClient(application(waiting, jobs, secret=SECRET), base_url=ORIGIN, headers={"origin": ORIGIN})
    answers = []
    asking = threading.Thread(target=lambda: answers.append(post(busy, text="the cat")))
    asking.start()
    assert waiting.is_running.wait(SECONDS)
    assert busy.get(f"/{SECRET}/").status_code == 200
    assert post(busy, "cancel").json() == {"cancelled": 1}
    asking.join(SECONDS)
    assert [event["type"] for event in events(answers[0])] == ["started", "cancelled"]
    assert post(busy, "cancel").json() == {"cancelled": 0}
    jobs.close()


def test_a_full_queue_is_told():
    waiting, jobs = Waiting(), Jobs(max_waiting=1)
    busy = TestClient(application(waiting, jobs, secret=SECRET), base_url=ORIGIN, headers={"origin": ORIGIN})
    answers = queue.Queue()

    def ask(client):
        answers.put(busy.post(f"/{SECRET}/trace", json={"client": client, "text": "a"}))

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("runs", "waits", "is refused")]
    threads[0].start()
    assert waiting.is_running.wait(SECONDS)
    threads[1].start()
    threads[2].start()
    refused = answers.get(timeout=SECONDS)  # the others last until they may end
    assert refused.status_code == 429
    assert "wait until one of them is done" in told(refused)["do"]
    waiting.may_end.set()
    for thread in threads:
        thread.join(SECONDS)
    assert [events(answers.get())[-1]["type"] for _ in range(2)] == ["done", "done"]
    jobs.close()
