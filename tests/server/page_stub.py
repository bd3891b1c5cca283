"""A stand-in for the server, of the standard library: it serves the page and answers the routes that the page asks."""

import json
import mimetypes
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import specprefill_jax

STATIC = Path(specprefill_jax.__file__).parent / "server" / "static"
PREFIX = "/some/prefix/"  # a page that works below it works anywhere
CHUNK = 32
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PHASES = {
    "tokenise": 0.01,
    "queue": 0.0,
    "speculate": 0.5,
    "score": 0.09,
    "main_prefill": 0.6,
    "first_token": 0.04,
    "decode": 1.0,
}
DENSE = {**PHASES, "speculate": 0.0, "score": 0.0, "main_prefill": 3.05}


class Asked(NamedTuple):
    """A request as it came."""

    path: str
    authorization: str | None
    body: Any


def render(body: dict[str, Any]) -> bytes:
    """The prompt of a body. A byte is a token, so that chunks cut characters, as they may with real tokenizers."""
    if "prompt" in body:
        return body["prompt"].encode()
    return "".join(f"<{message['role']}>{message['content']}<answer>" for message in body["messages"]).encode()


def kept(chunks: int) -> str:
    """Which chunks are kept: the first, the last, and every fourth."""
    return "".join("1" if index in (0, chunks - 1) or index % 4 == 2 else "0" for index in range(chunks))


def forced(chunks: int) -> str:
    """Which chunks are kept whatever their score: the first and the last."""
    return "1" + "0" * (chunks - 2) + "1"


class Stub(ThreadingHTTPServer):
    """Set the attributes to have it answer otherwise; `asked` is what it was asked, in order."""

    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}{PREFIX}"
        self.lock = threading.Lock()
        self.asked: list[Asked] = []
        self.answering = 0
        self.most_answering = 0
        self.refusal: tuple[int, dict[str, str], str] | None = None
        """Status, headers and message with which POSTs are refused."""
        self.reason: tuple[str, str | None] | None = None
        """Reason and detail with which a prompt is read whole although it may be read in part."""
        self.key: str | None = None
        self.chat_template = True
        self.models_status = 200
        self.broken: str | None = None
        """What the stream ends with after its first token, in place of the rest."""
        self.hold = threading.Event()
        """While it is not set, an answer stops after its first token."""
        self.hold.set()
        self.gone = threading.Event()
        """Set when a client went away in the middle of an answer."""
        self.cached_tokens = 0

    def paths(self, *names: str) -> list[Asked]:
        """What was asked of the given paths."""
        return [asked for asked in self.asked if asked.path in names]

    def reading(self, body: dict[str, Any], num_tokens: int) -> dict[str, Any]:
        """The `specprefill` object of an answer."""
        wanted = body["specprefill"]
        why = self.reason or (None if wanted["enabled"] else ("disabled", None))
        chunks = -(-num_tokens // CHUNK)
        mask = "1" * chunks if why else kept(chunks)
        last = num_tokens - (chunks - 1) * CHUNK
        phases = DENSE if why else PHASES
        ttft = sum(phases.values()) - phases["decode"]
        found = {
            "engaged": not why,
            "reason": why[0] if why else "engaged",
            "detail": why[1] if why else None,
            "keep_rate": wanted.get("keep_rate", 1.0),
            "num_tokens": num_tokens,
            "kept_tokens": num_tokens if why else (mask.count("1") - 1) * CHUNK + last,
            "cached_tokens": self.cached_tokens,
            "predicted_gain": None,
            "timings": {**phases, "ttft": ttft, "total": ttft + phases["decode"]},
        }
        if wanted.get("map"):
            found |= {"chunk_size": CHUNK, "kept_chunks": mask, "forced_chunks": forced(chunks)}
        return found


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Stub

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        """The page's files and the model."""
        name = self.path.removeprefix(PREFIX)
        if name == "v1/models":
            self.server.asked.append(Asked(name, self.headers["Authorization"], None))
            card = {"id": "tiny-main", "root": "tiny", "max_model_len": 4096}
            if self.server.models_status != 200:
                self.refuse(self.server.models_status, {}, "the models are loading")
            elif self.allowed():
                self.answer(200, json.dumps({"object": "list", "data": [card]}).encode())
            return
        path = STATIC / (name or "index.html")
        if path.parent == STATIC and path.is_file():
            kind = mimetypes.guess_type(path)[0] or "application/octet-stream"
            self.answer(200, path.read_bytes(), kind, {"Content-Security-Policy": POLICY})
        else:
            self.refuse(404, {}, f"no such path: {self.path}")

    def do_POST(self) -> None:
        """Answers, and tokens to text and back."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name = self.path.removeprefix(PREFIX)
        self.server.asked.append(Asked(name, self.headers["Authorization"], body))
        if not self.allowed():
            return
        if self.server.refusal:
            self.refuse(*self.server.refusal)
        elif "messages" in body and not self.server.chat_template:
            self.refuse(400, {}, "tiny: no chat template named 'default' (found none): give the prompt as text")
        elif name == "tokenize":
            tokens = list(render(body))
            self.answer(200, json.dumps({"count": len(tokens), "max_model_len": 4096, "tokens": tokens}).encode())
        elif name == "detokenize":
            # Like a sentence-piece decoder, it loses a space in front.
            text = bytes(body["tokens"]).decode(errors="replace").removeprefix(" ")
            self.answer(200, json.dumps({"prompt": text}).encode())
        elif name in ("v1/chat/completions", "v1/completions"):
            self.stream(body, chat="messages" in body)
        else:
            self.refuse(404, {}, f"no such path: {self.path}")

    def allowed(self) -> bool:
        """Whether the key is right; refused where it is not."""
        right = not self.server.key or self.headers["Authorization"] == f"Bearer {self.server.key}"
        if not right:
            self.refuse(401, {}, "wrong key")
        return right

    def answer(
        self, status: int, body: bytes, kind: str = "application/json", headers: dict[str, str] | None = None
    ) -> None:
        """A whole answer."""
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def refuse(self, status: int, headers: dict[str, str], message: str) -> None:
        """An error in OpenAI's shape."""
        error = {"error": {"message": message, "type": "error", "param": None, "code": None}}
        self.answer(status, json.dumps(error).encode(), headers=headers)

    def stream(self, body: dict[str, Any], chat: bool) -> None:
        """An answer token by token, in frames that are cut anywhere."""
        server = self.server
        with server.lock:
            server.answering += 1
            server.most_answering = max(server.most_answering, server.answering)
        try:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.end_headers()
            self.send(": keep-alive\n\n")
            label = "sparse" if body["specprefill"]["enabled"] else "dense"
            pieces = ["The ", "<b>", label, "</b> é", "🦉."]
            for index, piece in enumerate(pieces):
                delta = {"role": "assistant"} if index == 0 else {}
                part = {"delta": {**delta, "content": piece}} if chat else {"text": piece}
                self.event({"choices": [{"index": 0, **part, "finish_reason": None}]})
                if index == 0 and not server.hold.is_set():
                    while not server.hold.wait(0.01):
                        self.send(": keep-alive\n\n")
                if index == 0 and server.broken is not None:
                    self.send(server.broken)
                    return
            num_tokens = len(render(body))
            last = {"delta": {}} if chat else {"text": ""}
            reading = server.reading(body, num_tokens)
            self.event({"choices": [{"index": 0, **last, "finish_reason": "length"}], "specprefill": reading})
            usage = {
                "prompt_tokens": num_tokens,
                "completion_tokens": len(pieces),
                "total_tokens": num_tokens + len(pieces),
            }
            self.event({"choices": [], "usage": usage})
            self.send("data: [DONE]\n\n")
        except (BrokenPipeError, ConnectionResetError):
            server.gone.set()
        finally:
            with server.lock:
                server.answering -= 1

    def event(self, event: dict[str, Any]) -> None:
        """One frame, its bytes in two pieces, so that frames and characters are cut."""
        data = f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode()
        middle = data.find("🦉".encode()) + 2
        self.wfile.write(data[:middle])
        self.wfile.flush()
        self.wfile.write(data[middle:])
        self.wfile.flush()

    def send(self, text: str) -> None:
        """Text as it is."""
        self.wfile.write(text.encode())
        self.wfile.flush()
