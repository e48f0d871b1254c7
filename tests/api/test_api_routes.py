"""Completions, models, tokens, health, metrics and the admin routes."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from openai import OpenAI
from server_api import Node


def complete(node: Node, prompt: Any, **fields: Any) -> Any:
    response = node.client.post("/v1/completions", json={"prompt": prompt, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def test_a_completion_has_text_and_usage(node: Node) -> None:
    body = complete(node, "SAY a|b")
    assert body["object"] == "text_completion"
    expected = {"index": 0, "text": "ab", "logprobs": None, "finish_reason": "stop"}
    assert body["choices"] == [expected]
    assert body["usage"]["total_tokens"] == 12


def test_prompts_and_choices_multiply_prompt_by_prompt(node: Node) -> None:
    body = complete(node, ["SAY a", "SAY b"], n=2)
    assert [(c["index"], c["text"]) for c in body["choices"]] == list(enumerate("aabb"))
    assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (20, 4)


@pytest.mark.parametrize(("prompt", "count"), [([1, 2, 3], 1), ([[1, 2], [3]], 2)])
def test_token_ids_are_prompts_too(node: Node, prompt: Any, count: int) -> None:
    assert len(complete(node, prompt)["choices"]) == count
    sent = [request.prompt for request in node.pool.engine.requests[-count:]]
    assert sent == ([(1, 2, 3)] if count == 1 else [(1, 2), (3,)])


def test_completions_default_to_sixteen_tokens(node: Node) -> None:
    body = complete(node, "SAY " + "|".join("x" * 20))
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 16


def test_legacy_logprobs_are_parallel_lists(node: Node) -> None:
    logprobs = complete(node, "SAY ab|c", logprobs=1)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["ab", "c"] and logprobs["text_offset"] == [0, 2]
    assert logprobs["top_logprobs"] == [{"ab": -0.5}, {"c": -0.5}]


def test_the_official_client_streams_completions_and_lists_models(node: Node) -> None:
    client = OpenAI(base_url=node.url + "/v1", api_key="none", max_retries=0)
    stream = client.completions.create(model="local", prompt="SAY a|b|c", stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "abc"
    assert [model.id for model in client.models.list()] == ["tiny:1b", "plain/base"]
    assert client.models.retrieve("plain/base").id == "plain/base"
    client.close()


def test_a_streamed_completion_ends_with_usage_when_asked(node: Node) -> None:
    request = {"prompt": "SAY a|b", "stream": True, "stream_options": {"include_usage": True}}
    text = node.client.post("/v1/completions", json=request).text
    payloads = [json.loads(e[6:]) for e in text.split("\n\n")[:-2] if e.startswith("data: ")]
    assert payloads[-1]["usage"]["completion_tokens"] == 2 and payloads[-1]["choices"] == []
    assert payloads[-2]["choices"][0]["finish_reason"] == "stop"


def test_models_say_their_context_length(node: Node) -> None:
    model = node.client.get("/v1/models/tiny:1b").json()
    assert model["context_length"] == model["meta"]["n_ctx"] == 4096
    assert model["object"] == "model" and model["loaded"] is True


def test_text_becomes_tokens_and_back(node: Node) -> None:
    tokens = node.client.post("/tokenize", json={"content": "hey"}).json()
    assert (tokens["tokens"], tokens["count"]) == ([104, 101, 121], 3)
    back = node.client.post("/detokenize", json={"tokens": tokens["tokens"]}).json()
    assert back["content"] == "hey"


@pytest.mark.parametrize("tokens", [[-1], [1000], [2**63], ["a"], "a", [1.5]])
def test_ids_outside_the_vocabulary_are_not_detokenized(node: Node, tokens: Any) -> None:
    response = node.client.post("/detokenize", json={"tokens": tokens})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("tokens")


def test_health_says_loading_and_nothing_more(node: Node) -> None:
    for path in ("/health", "/healthz", "/readyz"):
        assert node.client.get(path).json() == {"status": "ok"}
    node.pool.loading = True
    loading = node.client.get("/health")
    node.pool.loading = False
    assert (loading.status_code, loading.json()) == (503, {"status": "loading"})


def test_metrics_are_prometheus_text_with_our_prefix(node: Node) -> None:
    node.chat("SAY a|b")
    response = node.client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    sample = re.compile(r'inglenook_[a-z_]+(\{([a-z]+="[^"]*",?)+\})? [0-9.e+-]+')
    for line in response.text.splitlines():
        assert line.startswith("# ") or sample.fullmatch(line), line
    for name in ("prompt", "cached", "completion"):
        assert f'inglenook_{name}_tokens_total{{model="tiny:1b"}}' in response.text
    for source in ("device", "dram", "ssd", "computed"):
        labels = f'{{model="tiny:1b",source="{source}"}}'
        assert f"inglenook_prompt_tokens_by_source_total{labels}" in response.text
    assert 'inglenook_worker_restarts_total{model="tiny:1b"} 2' in response.text


def test_histogram_buckets_are_cumulative(node: Node) -> None:
    node.chat("SAY a|b")
    text = node.client.get("/metrics").text
    name = "inglenook_time_to_first_token_seconds"
    counts = [int(n) for n in re.findall(rf"{name}_bucket\{{[^}}]*\}} (\d+)", text)]
    assert counts == sorted(counts)
    assert f'{name}_count{{model="tiny:1b"}} {counts[-1]}' in text


def test_status_shows_models_with_their_counters(node: Node) -> None:
    status = node.admin("GET", "status").json()
    assert status["models"][0]["id"] == "tiny:1b" and status["models"][0]["plan"] == ["a"]
    assert status["models"][0]["stats"]["cells_total"] == 4096 and status["loading"] is False


def test_models_are_loaded_and_unloaded(node: Node) -> None:
    load = node.admin("POST", "models/load", json={"model": "local", "keep_alive_s": 60})
    assert load.json() == {"model": "tiny:1b"} and node.pool.kept_alive_s[-1] == 60
    assert node.admin("POST", "models/unload", json={"model": "tiny:1b"}).status_code == 200
    node.pool.busy = True
    busy = node.admin("POST", "models/unload", json={"model": "tiny:1b"})
    node.pool.busy = False
    assert (busy.status_code, busy.json()["error"]["code"]) == (409, "conflict")


def test_a_load_without_model_names_the_field(node: Node) -> None:
    response = node.admin("POST", "models/load", json={})
    assert response.json()["error"]["param"] == "model"


def test_the_configuration_is_shown_without_its_secrets(node: Node) -> None:
    response = node.admin("GET", "config")
    rows = {row["key"]: row for row in response.json()["settings"]}
    assert rows["api.key"]["value"] == "(set)" and "kkkk" not in response.text
    assert rows["api.port"] == {**rows["api.port"], "value": 4663, "source": "default"}


def test_shutdown_answers_before_it_stops(node: Node) -> None:
    assert node.admin("POST", "shutdown").json() == {"status": "stopping"}
    assert node.shutdowns == [True]


def test_computed_state_is_shown_by_tier_and_forgotten_on_request(node: Node) -> None:
    (model,) = node.admin("GET", "kv").json()["models"]
    assert model["id"] == "tiny:1b"
    assert model["prompt_tokens"] == {"device": 5, "dram": 0, "ssd": 0, "computed": 5}
    assert node.admin("POST", "kv/flush", json={}).json() == {"flushed": True}
    assert node.admin("POST", "kv/purge", json={"namespace": "ab" * 16}).json() == {"purged": True}
    assert node.pool.engine.purged[-1] == "ab" * 16
    refused = node.admin("POST", "kv/purge", json={"namespace": "../x"})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "namespace"
