"""The routes that OpenAI's and llama-server's clients use."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from node.api.answer import Call, Caller, answer
from node.api.chat import ChatCall
from node.api.completions import CompletionCall
from node.api.fields import checked
from node.api.sampling import check_text_size, check_tokens
from node.api.schemas import DetokenizeBody, TokenizeBody
from node.api.service import Service
from node.api.stream import Exchange, json_response, read_json
from node.base import ModelCard
from node.errors import InvalidRequest, NotFound

__all__ = ["add_public_routes"]


def add_public_routes(app: FastAPI, service: Service) -> None:

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return _generate(
            service, ChatCall(await read_json(request.receive), service.config), request
        )

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await read_json(request.receive)
        return _generate(service, CompletionCall(body, service.config), request)

    @app.get("/v1/models")
    async def list_models() -> Response:
        return json_response(
            {"object": "list", "data": [_card(m) for m in await service.pool.models()]}
        )

    @app.get("/v1/models/{name:path}")
    async def get_model(name: str) -> Response:
        model_id = service.resolve(name)
        for card in await service.pool.models():
            if card.id == model_id:
                return json_response(_card(card))
        raise NotFound("this model has just been removed", param="model", code="model_not_found")

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        body = checked(await read_json(request.receive), TokenizeBody)
        return await _tokenize(service, body)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        body = checked(await read_json(request.receive), DetokenizeBody)
        async with service.pool.use(service.resolve(body.model)) as loaded:
            check_tokens(body.tokens, loaded.engine.info.n_vocab, "tokens")
            text = await loaded.engine.detokenize(body.tokens)
        return json_response({"model": loaded.id, "content": text, "prompt": text})

    @app.get("/health")
    @app.get("/healthz")
    @app.get("/readyz")
    async def health() -> Response:
        if service.pool.loading:
            return json_response({"status": "loading"}, 503)
        return json_response({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        text = service.metrics.render(service.gate, await service.pool.states())
        return Response(text, media_type="text/plain; version=0.0.4")


def _generate(service: Service, call: Call, request: Request) -> Response:
    caller = Caller(request.scope["request_id"], request.scope["tenant"])
    return Exchange(lambda receive, send: answer(service, call, caller, receive, send))


async def _tokenize(service: Service, body: TokenizeBody) -> Response:
    text = body.content if body.content is not None else body.prompt
    if text is None:
        raise InvalidRequest("content: is required", param="content")
    check_text_size([text], service.config.api.tokenizer_input_bytes, "content")
    async with service.pool.use(service.resolve(body.model)) as loaded:
        tokens = await loaded.engine.tokenize(
            text, add_special=body.add_special, parse_special=body.parse_special
        )
        window = loaded.engine.info.n_ctx
    return json_response(
        {"model": loaded.id, "tokens": tokens, "count": len(tokens), "max_model_len": window}
    )


def _card(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.id,
        "object": "model",
        "created": card.created_s,
        "owned_by": "inglenook",
        "context_length": card.context_tokens,
        "loaded": card.loaded,
        "meta": {"n_ctx": card.context_tokens, "size": card.size_bytes, "source": card.source},
    }
