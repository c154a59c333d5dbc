"""Who leaves in the middle, a server without an address, and a queue that is closed while something is asked."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from live_model import session

from attention_residuals.errors import ConfigError
from attention_residuals.page.jobs import Job, Jobs, QueueFullError
from attention_residuals.page.server import application, listener

SECRET = "a-Secret_0"
HEADERS = [
    (b"host", b"127.0.0.1:8000"),
    (b"origin", b"http://127.0.0.1:8000"),
    (b"content-type", b"application/json"),
    (b"content-length", b"500"),
]


@pytest.mark.parametrize("kind", ["trace", "cancel"])
def test_who_leaves_in_the_middle_of_a_request_is_no_fault(kind):
    jobs = Jobs()
    app = application(session(), jobs, secret=SECRET)
    messages = [
        {"type": "http.request", "body": b'{"client": "me", ', "more_body": True},
        {"type": "http.disconnect"},
    ]
    scope = {
        "type": "http", "method": "POST", "path": f"/{SECRET}/{kind}", "raw_path": b"", "query_string": b"",
        "root_path": "", "scheme": "http", "headers": HEADERS, "server": None, "client": None,
    }  # fmt: skip

    async def receive():
        return messages.pop(0)

    async def send(message):
        sent.append(message)

    sent = []
    with ThreadPoolExecutor() as thread:  # for the tests of pages have a loop in this one
        thread.submit(lambda: asyncio.run(app(scope, receive, send))).result()
    assert sent[0]["status"] == 400
    jobs.close()


def test_an_empty_host_is_refused_as_it_would_be_every_address():
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0"):
        listener("", 0)


def test_a_queue_that_closes_while_something_is_asked_takes_it_or_refuses_it():
    jobs, told = Jobs(), []
    take, closing = jobs._thread.submit, threading.Thread(target=jobs.close)

    def taken_late(run):
        closing.start()
        closing.join(0.3)  # as long as it takes to close, where nothing keeps it from closing
        return take(run)

    jobs._thread.submit = taken_late
    job = Job(owner="me", kind="trace", work=lambda check: iter([{"type": "done"}]), tell=told.append)
    jobs.submit(job)
    closing.join(20)
    assert [event["type"] for event in told][-1] in ("done", "cancelled")
    with pytest.raises(QueueFullError):
        jobs.submit(job)
