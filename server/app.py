"""The endpoints, documented by OpenAPI at ``/docs`` and ``/openapi.json``, and their server."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException
from starlette.responses import Response
from uvicorn.config import LOGGING_CONFIG

from .. import __version__
from ..common.errors import OpcastError
from ..common.files import is_yaml
from ..models.core.store import read_manifest
from ..predict.locate import find_model, is_untrained
from . import answers, cluster_schemas, documents, schemas
from .bodies import PROGRAM, WHAT_IF, P, body, malformed, program_task
from .cluster_schemas import ModelBody
from .documents import explorer_page
from .errors import RequestError, error_response, json_response, page_response
from .fork_server import Reply
from .guard import Direct, Guard
from .metrics import CONTENT_TYPE, write_json_lines
from .service import Service
from .settings import ServeError, ServerSettings

#: Seconds that open requests have to finish when the server stops; documented in docs/server.md.
_GRACE_S = 30

logger = logging.getLogger(__name__)
T = TypeVar("T")
Handler = Callable[[Request], Awaitable[Response]]
# Built once: compiling a pydantic validator takes milliseconds, running it microseconds.
_SIMULATE: TypeAdapter[ModelBody] = TypeAdapter(cluster_schemas.SimulateQuery)
_SIMULATE_SERVING: TypeAdapter[ModelBody] = TypeAdapter(cluster_schemas.SimulateServingQuery)
_SWEEP: TypeAdapter[ModelBody] = TypeAdapter(cluster_schemas.SweepQuery)
_PLAN_SERVING: TypeAdapter[ModelBody] = TypeAdapter(cluster_schemas.PlanServingQuery)


def create_app(settings: ServerSettings) -> FastAPI:
    """Create the application; models are loaded when it starts.

    Args:
        settings: Models and limits of the server.
    """
    service = Service(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            service.load()
            # After the models: a damaged one is then reported here, not by the fork server.
            await service.sandbox.start()
            _collect_rarely()
            yield
        # Also when loading fails half-way: the fork server must not outlive the server.
        finally:
            service.close()

    app = FastAPI(
        title="opcast",
        version=__version__,
        lifespan=lifespan,
        redoc_url=None,
        description="Predicts how long ML programs, kernels and training steps take on a device.",
    )
    app.state.service = service
    _add_error_handlers(app)
    _add_information(app, service)
    handlers = _add_predictions(app, service)
    paths = [str(getattr(route, "path", "")) for route in app.routes]
    # The middleware added last runs first: the guard checks its limits before ``Direct`` answers.
    app.add_middleware(Direct, handlers=handlers)
    app.add_middleware(Guard, settings=settings, metrics=service.metrics, paths=paths)
    documents.extend(app, secured=bool(settings.token))
    return app


def _collect_rarely() -> None:
    """Exclude the models from garbage collection, which would stall answers for 0.1 s."""
    gc.collect()
    gc.freeze()
    # By default CPython collects after some hundreds of allocations. A batch creates tens of
    # thousands of objects that die by reference count, so such collections find nothing.
    # Engineering estimate.
    gc.set_threshold(100_000, 50, 100)


def _add_information(app: FastAPI, service: Service) -> None:
    """Add the endpoints that describe the server."""
    # Made on the first request, when the models are loaded.
    page = cache(lambda: explorer_page(service).encode())

    @app.get("/", include_in_schema=False)
    async def explore() -> Response:
        """Page with forms for the other endpoints."""
        return page_response(page())

    # Generated clients have functions named after the operation ids.
    @app.get("/health", responses=documents.FREE, operation_id="health")
    async def health() -> answers.Health:
        """Check that the server is up, and list the models it serves."""
        models = list(service.predictors)
        return answers.Health(
            status="ok", version=__version__, models=models, compiles=service.settings.allow_compile
        )

    @app.get("/ready", responses=documents.READY, operation_id="ready")
    async def ready() -> answers.Ready:
        """Check that the server accepts programs; restart the fork server if it died."""
        await service.sandbox.start()
        if service.sandbox.full:
            raise service.sandbox.busy()
        return answers.Ready(status="ready")

    @app.get(
        "/metrics",
        responses=documents.METRICS,
        response_class=Response,
        operation_id="metrics",
    )
    async def metrics() -> Response:
        """Metrics for Prometheus: requests, times, batches, cache, crashes."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    @app.get(
        "/v1/report/{digest}",
        response_class=Response,
        responses=documents.KEPT,
        operation_id="kept_report",
    )
    async def kept_report(digest: str) -> Response:
        """Get an earlier page by the digest in its ``Content-Location``."""
        return page_response(service.report(digest))

    @app.get(
        "/v1/devices",
        response_model=list[answers.DeviceEntry],
        responses=documents.LIMITED,
        operation_id="devices",
    )
    async def devices() -> Response:
        """List the devices that can be predicted."""
        return json_response(service.devices())

    @app.get(
        "/v1/models",
        response_model=list[answers.ModelEntry],
        responses=documents.LIMITED,
        operation_id="models",
    )
    async def models() -> Response:
        """List the models that are served."""
        return json_response(list(service.models.values()))


def _add_predictions(app: FastAPI, service: Service) -> Mapping[str, Handler]:
    """Add the endpoints that predict.

    They parse request bodies themselves, which is several times faster than FastAPI.

    Returns:
        Their handlers by path.
    """
    handlers: dict[str, Handler] = {}

    def post(path: str) -> Callable[[Handler], Handler]:
        def add(handler: Handler) -> Handler:
            responses, body = documents.POSTS[path]
            app.post(
                path,
                operation_id=handler.__name__,
                responses=responses,
                openapi_extra=body,
                response_class=Response,
            )(handler)
            handlers[path] = handler
            return handler

        return add

    @post("/v1/predict/kernels")
    async def predict_kernels(request: Request) -> Response:
        """Predict many operators, given as text or by column, or many kernels as HLO modules."""
        query = await body(request, schemas.QUERY)
        model = service.model(query.model)
        device = service.device(model, query.device)
        return json_response(await service.kernels.answer(query, model, device))

    @post("/v1/predict/program")
    async def predict_program(request: Request) -> Response:
        """Predict a program, sent as JSON, or uploaded as is with its options in the query."""
        status, found = await programmed(request, "program", PROGRAM)
        return json_response(found, status)

    @post("/v1/what-if")
    async def what_if(request: Request) -> Response:
        """Predict a program on modified devices, or a workload with modified settings."""
        status, found = await programmed(request, "what-if", WHAT_IF)
        return json_response(found, status)

    @post("/v1/report")
    async def report(request: Request) -> Response:
        """Make the report page of a program; the request is as for a prediction."""
        status, found = await programmed(request, "report", PROGRAM)
        if status != 200:
            return json_response(found, status)
        answer = page_response(found)
        answer.headers["Content-Location"] = f"/v1/report/{service.kept(found)}"
        return answer

    @post("/v1/simulate")
    async def simulate(request: Request) -> Response:
        """Predict one training step on a cluster under a parallel plan."""
        return await clustered(request, "simulate", _SIMULATE)

    @post("/v1/simulate-serving")
    async def simulate_serving(request: Request) -> Response:
        """Predict latencies, throughput and memory of LLM serving under a load."""
        return await clustered(request, "simulate-serving", _SIMULATE_SERVING)

    @post("/v1/sweep")
    async def sweep(request: Request) -> Response:
        """Evaluate the parallel plans of a training step on a cluster and return the best."""
        return await clustered(request, "sweep", _SWEEP)

    @post("/v1/plan-serving")
    async def plan_serving(request: Request) -> Response:
        """Search for the cheapest serving deployments that meet an SLO."""
        return await clustered(request, "plan-serving", _PLAN_SERVING)

    async def programmed(request: Request, kind: str, schema: TypeAdapter[P]) -> Reply:
        task, payload = await program_task(request, service, schema)
        return await _while_connected(request, service.sandbox.run(task | {"kind": kind}, payload))

    async def clustered(request: Request, kind: str, schema: TypeAdapter[ModelBody]) -> Response:
        query = await body(request, schema)
        device, cluster = (str(getattr(query, name, "")) for name in ("device", "cluster"))
        if device:
            service.device(service.model(None), device)
        # ``find_cluster`` reads files, too; a request must not name a path.
        if is_yaml(cluster):
            raise RequestError(422, "the server does not read files", where="cluster")
        task = {"kind": kind, "model": service.operator_model(query.model)}
        work = service.sandbox.run(task, query.model_dump_json().encode())
        status, found = await _while_connected(request, work)
        return json_response(found, status)

    return handlers


async def _while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Wait for work, and cancel it when the client disconnects.

    Raises:
        RequestError: The client disconnected.
    """
    doing = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((doing, gone), return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            # Only for the metrics; nginx logs such requests with this status, too.
            raise RequestError(499, "the client closed the connection")
        return doing.result()
    finally:
        # Also when the request itself is cancelled by its time limit.
        doing.cancel()
        gone.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _add_error_handlers(app: FastAPI) -> None:
    """Give all error responses the same format."""

    @app.exception_handler(OpcastError)
    async def refused(request: Request, error: OpcastError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return error_response(malformed(error.errors()))

    @app.exception_handler(HTTPException)
    async def known(request: Request, error: HTTPException) -> Response:
        answer = error_response(
            RequestError(error.status_code, str(error.detail), hint="see /docs")
        )
        answer.headers.update(error.headers or {})
        return answer


def serve(
    settings: ServerSettings,
    ready: Callable[[str], None] = lambda url: None,
    loading: Callable[[str], None] = lambda text: None,
) -> None:
    """Serve until SIGINT or SIGTERM.

    Args:
        settings: Models, address and limits.
        ready: Called with the address once the models are loaded and connections are accepted.
        loading: Called with a message before the models load; with ``log_requests`` the message
            is logged instead.

    Raises:
        ServeError: The address cannot be bound.
        ModelError: A model is missing or damaged.
    """
    for name in settings.models:
        if not is_untrained(name):
            read_manifest(find_model(name))
    # Bound before the models load, so that a taken port is reported at once.
    if settings.log_requests:
        write_json_lines()
    with bound(settings) as listener:
        address, port = listener.getsockname()[:2]
        text = f"loading models: {', '.join(settings.models)} …"
        (logger.info if settings.log_requests else loading)(text)
        config = uvicorn.Config(
            create_app(settings),
            log_level="warning",
            log_config=None if settings.log_requests else LOGGING_CONFIG,
            # /metrics counts requests; logging a line costs as much as a cached answer.
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_S,
            timeout_keep_alive=30,
            ws="none",
            # Bounds memory only, since idle keep-alive connections count towards it; the guard
            # limits requests and refuses them with JSON. Engineering estimate.
            limit_concurrency=max(1024, 4 * settings.concurrency),
        )
        shown = f"[{address}]" if ":" in address else address
        server = _Server(config, partial(ready, f"http://{shown}:{port}"))
        server.run(sockets=[listener])
        if not server.started:
            raise ServeError("the server did not start", hint="the log above has the reason")


class _Server(uvicorn.Server):
    """Uvicorn server that reports when it accepts connections.

    Args:
        config: Configuration of the server.
        ready: Called once connections are accepted.
    """

    def __init__(self, config: uvicorn.Config, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._ready = ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._ready()


def bound(settings: ServerSettings) -> socket.socket:
    """Bind a socket to the address of the settings.

    Raises:
        ServeError: The address is in use, not on this machine, or not permitted.
    """
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Lets a restarted server bind while old connections are in TIME_WAIT. On Windows the option
        # would allow a second process to take over the port.
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host, settings.port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ServeError(
            f"cannot listen at {settings.host}:{settings.port}: {error}",
            hint="choose another with --host and --port; --port 0 takes a free one",
        ) from None
    return listener
