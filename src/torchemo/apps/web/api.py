"""What the page asks of the server: one route per verb, JSON in and out."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, final

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from torchemo.apps.web import saved
from torchemo.apps.web.answering import Answering
from torchemo.apps.web.board import Board
from torchemo.apps.web.decoder import Decoder
from torchemo.apps.web.session import Session, Sessions, new_key
from torchemo.core.errors import DataError, ResourceError, TorchemoError

SENDERS = 4
"""Files that are received and decoded at the same time; more wait."""
ACTION_BYTES = 10_000

Handler: TypeAlias = Callable[[Request], Awaitable[Response]]


class Gone(Exception):
    """The session gave way to others, or never was."""


@final
class Api:
    """The routes of the page.

    Args:
        answering: The run.
        decoder: Decodes what is sent.
        sessions: The tabs.
    """

    def __init__(self, answering: Answering, decoder: Decoder, sessions: Sessions) -> None:
        self.answering, self.decoder, self.sessions = answering, decoder, sessions
        self._senders = asyncio.Semaphore(SENDERS)

    @property
    def routes(self) -> list[Route]:
        """Return all routes."""
        table: tuple[tuple[str, str, Handler], ...] = (
            ("GET", "/run", self.about),
            ("POST", "/sessions", self.begin),
            ("GET", "/sessions/{session}", self.state),
            ("POST", "/sessions/{session}/do", self.act),
            ("POST", "/sessions/{session}/images", self.add_image),
            ("GET", "/sessions/{session}/images/{image}", self.thumbnail),
            ("POST", "/sessions/{session}/remember", self.remember),
            ("GET", "/slots/{slot:int}/{place:int}", self.slot),
            ("GET", "/visits", self.visits),
            ("POST", "/visits/do", self.change_visits),
            ("GET", "/sessions/{session}/save", self.save),
            ("POST", "/sessions/{session}/open", self.open),
            ("GET", "/sessions/{session}/answers.{kind:str}", self.download),
        )
        return [Route(path, answered(do), methods=[verb]) for verb, path, do in table]

    async def about(self, request: Request) -> Response:
        """Return what the page says about the run."""
        return JSONResponse(self.answering.about)

    async def begin(self, request: Request) -> Response:
        """Begin a session."""
        return JSONResponse({"session": self.sessions.new()})

    async def state(self, request: Request) -> Response:
        """Return all there is to see."""
        return self._state(self._session(request))

    async def act(self, request: Request) -> Response:
        """Do one of the actions below."""
        session = self._session(request)
        asked = _json(await self._body(request, ACTION_BYTES))
        actions: dict[str, Callable[[], None]] = {
            "add_class": lambda: session.change(lambda b: b.with_box(new_key(), _text(asked))),
            "rename": lambda: session.change(lambda b: b.renamed(_key(asked), _text(asked) or "")),
            "remove_class": lambda: session.change(lambda b: b.without_box(_key(asked))),
            "remove_image": lambda: session.change(lambda b: b.without_image(_key(asked))),
            "clear": lambda: session.change(lambda b: Board()),
            "clear_queries": lambda: session.change(lambda b: Board(b.boxes)),
            "undo": session.undo,
            "answer": lambda: self.answering.start(session),
            "cancel": lambda: self.answering.cancel(session),
        }
        action = actions.get(str(asked.get("action")))
        if action is None:
            raise DataError("the page asked for an action that there is not.")
        action()
        return self._state(session)

    async def add_image(self, request: Request) -> Response:
        """Take an image into a class or among the queries."""
        session = self._session(request)
        box, name = request.query_params.get("box"), request.query_params.get("name", "")
        name = saved.file_name(name)
        async with self._senders:
            session.room(box)  # before anything is read
            body = await self._body(request, session.limits.image_bytes)
            image = await run_in_threadpool(self.decoder.decode, body, name=name)
        session.add_image(name, image, box=box)
        return self._state(session)

    async def remember(self, request: Request) -> Response:
        """Keep what is on the board as a visit."""
        session = self._session(request)
        await run_in_threadpool(self.answering.remember, session)
        # Its own visit has no part in the answers of this session.
        self.sessions.forget_answers(but=session)
        return self._state(session)

    async def visits(self, request: Request) -> Response:
        """Return what is in the store."""
        store = self.answering.visits
        if store is None:
            raise Gone
        return JSONResponse(await run_in_threadpool(lambda: store.listing))

    async def change_visits(self, request: Request) -> Response:
        """Rename or forget a class of the store."""
        store = self.answering.visits
        if store is None:
            raise Gone
        asked = _json(await self._body(request, ACTION_BYTES))
        name, new = str(asked.get("class", "")), str(asked.get("name", ""))
        if asked.get("action") == "forget":
            await run_in_threadpool(store.forget, name)
        elif asked.get("action") == "rename":
            await run_in_threadpool(store.rename, name, new)
        else:
            raise DataError("the page asked for an action that there is not.")
        self.sessions.forget_answers()
        return await self.visits(request)

    async def thumbnail(self, request: Request) -> Response:
        """Return the thumbnail of an image."""
        kept = self._session(request).images.get(request.path_params["image"])
        if kept is None:
            raise Gone
        keep = {"Cache-Control": "private, max-age=3600"}  # a key never names another image
        return Response(kept.image.thumbnail, media_type="image/jpeg", headers=keep)

    async def slot(self, request: Request) -> Response:
        """Return a thumbnail of a training task behind a slot."""
        images = self.answering.thumbnails(request.path_params["slot"])
        place = request.path_params["place"]
        if not place < len(images):
            raise Gone
        return Response(images[place], media_type="image/png")

    async def save(self, request: Request) -> Response:
        """Return classes, images and answers as a zip."""
        content = await run_in_threadpool(saved.packed, self._session(request))
        return _file(content, "session.zip", "application/zip")

    async def open(self, request: Request) -> Response:
        """Put a saved session in the place of what is on the page."""
        session = self._session(request)
        async with self._senders:
            body = await self._body(request, session.limits.session_bytes)
            board, images = await run_in_threadpool(
                saved.unpacked, body, self.decoder, session.limits
            )
        session.replace(board, images)
        return self._state(session)

    async def download(self, request: Request) -> Response:
        """Return the answers as CSV or JSON."""
        session, kind = self._session(request), request.path_params["kind"]
        if kind == "csv":
            return _file(saved.as_csv(session).encode(), "answers.csv", "text/csv")
        if kind == "json":
            content = json.dumps(saved.as_dict(session), indent=2).encode()
            return _file(content, "answers.json", "application/json")
        raise Gone

    def _session(self, request: Request) -> Session:
        found = self.sessions.find(request.path_params["session"])
        if found is None:
            raise Gone
        return found

    def _state(self, session: Session) -> Response:
        return JSONResponse(saved.state(session))

    async def _body(self, request: Request, most: int) -> bytes:
        """Read what is sent, up to a size and for a time."""
        parts, size = [], 0
        async with asyncio.timeout(self.sessions.limits.seconds):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise ResourceError(f"this is larger than {most / 1e6:.3g} MB.")
                parts.append(part)
        return b"".join(parts)


def answered(handler: Handler) -> Handler:
    """Turn errors for people into answers that the page can show."""

    async def safe(request: Request) -> Response:
        try:
            return await handler(request)
        except Gone:
            return JSONResponse({"error": "this is no longer here."}, 404)
        except TimeoutError:
            return JSONResponse({"error": "this took too long to arrive."}, 408)
        except ClientDisconnect:
            return Response(status_code=499)  # nobody reads it
        except TorchemoError as error:
            status = 413 if isinstance(error, ResourceError) else 400
            return JSONResponse({"error": str(error)}, status)

    return safe


def _json(body: bytes) -> dict[str, Any]:
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise DataError("the page sent something that is no JSON.") from error
    if not isinstance(found, dict):
        raise DataError("the page sent something that names no action.")
    return found


def _key(asked: dict[str, Any]) -> str:
    return str(asked.get("key"))


def _text(asked: dict[str, Any]) -> str | None:
    name = asked.get("name")
    return None if name is None else str(name)


def _file(content: bytes, name: str, kind: str) -> Response:
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return Response(content, media_type=kind, headers=headers)
