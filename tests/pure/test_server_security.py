"""Who gets in: tables of Host, Origin, key, content type and body size, over a real socket."""

from __future__ import annotations

import hmac
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgellm.server import gate
from edgellm.server.gate import Gate
from edgellm.server.settings import ServerSettings, is_loopback, read_api_keys
from edgellm_models.errors import ConfigError, NotFoundError, UsageError
from tests.support.served import Running, chat_body, http, serving

KEYS = ("first-key-1234", "second-key-5678")
PAGE = "http://a.test"


@pytest.fixture(scope="module")
def plain() -> Iterator[Running]:
    with serving(allowed_hosts=("my.box",), max_body_bytes=4000) as running:
        yield running


@pytest.fixture(scope="module")
def guarded() -> Iterator[Running]:
    with serving(api_keys=KEYS, cors_origins=(PAGE,)) as running:
        yield running


def error_of(response: Any) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:1234", 200),
        ("localhost.", 200),
        ("127.0.0.1:99", 200),
        ("[::1]", 200),
        ("[::1]:80", 200),
        ("my.box", 200),
        ("my.box:8080", 200),
        ("evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example:8080", 403),
        ("notlocalhost", 403),
        ("192.168.1.5", 403),
        ("[::2]", 403),
        ("", 403),
    ],
)
def test_a_foreign_host_is_refused(plain: Running, host: str, status: int) -> None:
    """G15: names that were made to point here (DNS rebinding) reach nothing."""
    with http(plain.address) as client:
        response = client.get("/v1/models", headers={"Host": host})
    assert response.status_code == status
    if status == 403:
        assert error_of(response)["code"] == "host_not_allowed"


def test_a_request_with_two_hosts_is_refused(plain: Running) -> None:
    port = int(plain.address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=5) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        assert raw.recv(100).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 200),
        ("same", 200),
        ("https://evil.example", 403),
        ("http://localhost:3000", 403),
        ("http://127.0.0.1.evil.example", 403),
        ("null", 403),
        ("", 403),
        ("file://", 403),
    ],
)
def test_a_foreign_origin_is_refused_and_never_reflected(
    plain: Running, origin: str | None, status: int
) -> None:
    """G15: by default no web page can use the model."""
    headers = {} if origin is None else {"Origin": plain.address if origin == "same" else origin}
    with http(plain.address) as client:
        for response in (
            client.get("/v1/models", headers=headers),
            client.post("/v1/chat/completions", json=chat_body(), headers=headers),
        ):
            assert response.status_code == status
            assert "access-control-allow-origin" not in response.headers


def test_preflights_and_answers_of_an_allowed_page(guarded: Running) -> None:
    """G14: OPTIONS needs no key; the headers are on every answer, refusals and streams included."""
    asked = {
        "Origin": PAGE,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,x-stainless-os",
    }
    key = {"Origin": PAGE, "Authorization": f"bearer {KEYS[1]}"}
    with http(guarded.address) as client:
        preflight = client.options("/v1/chat/completions", headers=asked)
        assert preflight.status_code == 204
        allowed = preflight.headers["access-control-allow-headers"].lower().replace(" ", "").split(",")
        assert {"authorization", "content-type", "x-stainless-os"} <= set(allowed)
        assert "POST" in preflight.headers["access-control-allow-methods"]
        answers = {
            200: client.post("/v1/chat/completions", json=chat_body(stream=True), headers=key),
            401: client.post("/v1/chat/completions", json=chat_body(), headers={"Origin": PAGE}),
            400: client.post("/v1/chat/completions", json={"messages": 7}, headers=key),
            404: client.get("/nothing", headers=key),
        }
        for status, response in answers.items():
            assert response.status_code == status
            assert response.headers["access-control-allow-origin"] == PAGE
            assert "origin" in response.headers["vary"].lower()
            assert "access-control-allow-credentials" not in response.headers
        foreign = client.options("/v1/models", headers={**asked, "Origin": "http://b.test"})
        assert foreign.status_code == 403 and "access-control-allow-origin" not in foreign.headers
        private = client.options(
            "/v1/models", headers={**asked, "Access-Control-Request-Private-Network": "true"}
        )
        assert private.status_code == 403
        assert "access-control-allow-private-network" not in private.headers


@pytest.mark.parametrize(
    ("authorization", "status"),
    [
        (f"Bearer {KEYS[0]}", 200),
        (f"bearer {KEYS[1]}", 200),
        (f"BEARER  {KEYS[1]}", 200),
        (None, 401),
        ("", 401),
        ("Bearer", 401),
        (f"Basic {KEYS[0]}", 401),
        (KEYS[0], 401),
        (f"Bearer {KEYS[0]}x", 401),
        (f"Bearer {KEYS[0][:-1]}", 401),
        (f"Bearer {KEYS[0].upper()}", 401),
        ("Bearer \xe9\xe9", 401),
    ],
)
def test_only_whole_keys_open(guarded: Running, authorization: str | None, status: int) -> None:
    headers = {} if authorization is None else {"Authorization": authorization.encode("latin-1")}
    with http(guarded.address) as client:
        for path in ("/v1/models", "/metrics", "/v1/edge/status", "/openapi.json", "/nothing"):
            response = client.get(path, headers=headers)
            expected = 404 if status == 200 and path == "/nothing" else status
            assert response.status_code == expected, path
            if status == 401:
                assert error_of(response)["type"] == "authentication_error"
                assert response.headers["www-authenticate"] == "Bearer"
        assert client.get("/health", headers=headers).status_code == 200


def test_keys_are_compared_in_constant_time_and_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[bytes] = []

    def compare(a: bytes, b: bytes) -> bool:
        compared.append(b)
        return hmac.compare_digest(a, b)

    monkeypatch.setattr(gate, "hmac", type("H", (), {"compare_digest": staticmethod(compare)}))

    async def nothing(*_: Any) -> None: ...

    checked = Gate(nothing, ServerSettings(api_keys=KEYS), "127.0.0.1")
    checked._check_key({"path": "/v1/models"}, {"authorization": f"Bearer {KEYS[0]}"})
    assert compared == [key.encode() for key in KEYS]


def test_no_key_is_logged_or_told(guarded: Running, caplog: pytest.LogCaptureFixture) -> None:
    secret = "sk-very-secret-0123456789"
    with caplog.at_level(0), http(guarded.address) as client:
        refused = client.get(f"/v1/models?key={secret}", headers={"Authorization": f"Bearer {secret}"})
        client.get("/v1/models", headers={"Authorization": f"Bearer {KEYS[0]}"})
    seen = (
        refused.text
        + str(guarded.accesses)
        + "".join(
            record.getMessage() for record in caplog.records if record.name.startswith(("edgellm", "uvicorn"))
        )
    )
    assert secret not in seen and not any(key in seen for key in KEYS)
    assert guarded.accesses[-1]["status"] == 200 and guarded.accesses[-1]["path"] == "/v1/models"


@pytest.mark.parametrize(
    ("size", "chunked", "status"),
    [(4000, False, 400), (4001, False, 413), (4000, True, 400), (4001, True, 413), (200_000, True, 413)],
)
def test_bodies_are_bounded(plain: Running, size: int, chunked: bool, status: int) -> None:
    body = b"[" + b" " * (size - 2) + b"]"
    content: Any = iter([body[i : i + 1000] for i in range(0, size, 1000)]) if chunked else body
    with http(plain.address) as client:
        response = client.post("/tokenize", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == status
    assert error_of(response)["message"]


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None]
)
def test_only_json_is_read(plain: Running, kind: str | None) -> None:
    """What pages may post without asking reaches no endpoint."""
    headers = {} if kind is None else {"Content-Type": kind}
    with http(plain.address) as client:
        response = client.post("/v1/chat/completions", content=b"{}", headers=headers)
    assert response.status_code == 415


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"7", b'{"a": NaN}', b"\xff", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}"]
)
def test_bodies_that_are_no_object(guarded: Running, body: bytes) -> None:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEYS[0]}"}
    with http(guarded.address) as client:
        response = client.post("/v1/chat/completions", content=body, headers=headers)
    assert response.status_code == 400
    assert len(error_of(response)["message"]) < 3000


@pytest.mark.parametrize(
    "fields",
    [
        {"host": "0.0.0.0"},
        {"host": "::"},
        {"host": "192.168.1.5"},
        {"port": 70000},
        {"queue": -1},
        {"grace_s": -1.0},
        {"request_timeout_s": 0.0},
        {"cors_origins": ("http://a.test/",)},
        {"cors_origins": ("a.test",)},
        {"allowed_hosts": ("http://a",)},
        {"host": "no such host.invalid"},
    ],
)
def test_settings_that_make_no_sense(fields: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ServerSettings(**fields)


def test_other_machines_need_a_key_or_a_word() -> None:
    assert ServerSettings(host="0.0.0.0", insecure=True).insecure
    assert ServerSettings(host="0.0.0.0", api_keys=("k",)).host == "0.0.0.0"
    assert ServerSettings().host == "127.0.0.1"
    assert [is_loopback(h) for h in ("127.0.0.1", "127.8.8.8", "::1", "localhost", "0.0.0.0")] == [
        True,
        True,
        True,
        True,
        False,
    ]


def test_beyond_loopback_plain_addresses_are_hosts_but_names_are_not() -> None:
    async def nothing(*_: Any) -> None: ...

    opened = Gate(nothing, ServerSettings(host="0.0.0.0", insecure=True), "0.0.0.0")
    assert opened._is_own_host("192.168.1.5:8080") and opened._is_own_host("[fe80::1]:80")
    assert not opened._is_own_host("evil.example") and not opened._is_own_host("")


def test_key_files(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# mine\n\nalpha-1\n  beta-2  \nalpha-1\n")
    path.chmod(0o600)
    assert read_api_keys(path) == (("alpha-1", "beta-2"), ())
    path.chmod(0o644)
    [notice] = read_api_keys(path)[1]
    assert notice.kind == "api_keys_exposed" and "alpha" not in notice.detail
    for text in ("", "# nothing\n", "two words\n", "\x00\n", "ümlaut\n", "x" * 600):
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            read_api_keys(path)
        assert "two words" not in str(caught.value)
    with pytest.raises(NotFoundError):
        read_api_keys(tmp_path / "none")
    with pytest.raises(ConfigError):
        read_api_keys(tmp_path)
