from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from node.chat import check_schema
from node.chat.grammar import ReplyGrammar
from node.engine.llama import LlamaModel
from node.engine.llama_sampling import Candidates, Grammar
from node.engine.messages import Load
from node.errors import InvalidRequest

_NODE = {
    "type": "object",
    "properties": {"next": {"$ref": "#/$defs/node"}, "v": {"type": "integer"}},
}
_CAT = {
    "type": "object",
    "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}},
    "required": ["kind"],
}
_DOG = {
    "type": "object",
    "properties": {"kind": {"const": "dog"}, "name": {"type": "string"}},
    "required": ["kind", "name"],
}
_ODD = 'q"{1000000}\\\n'

GOOD: dict[str, dict[str, Any]] = {
    "anything": {},
    "free object": {"type": "object"},
    "free array": {"type": "array", "minItems": 2},
    "properties": {"type": "object", "properties": {"a": {"type": "string"}, "b": {}}},
    "required in the middle": {
        "type": "object",
        "properties": {k: {"type": "boolean"} for k in "abcd"},
        "required": ["b", "d"],
    },
    "required but not named": {"type": "object", "properties": {"a": {}}, "required": ["z"]},
    "strange keys": {"type": "object", "properties": {_ODD: {}}, "required": [_ODD]},
    "map": {"type": "object", "additionalProperties": {"type": "integer"}, "maxProperties": 3},
    "closed": {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
    "forbidden property": {"properties": {"a": False, "b": {"type": "integer"}}, "type": "object"},
    "counted": {"type": "object", "properties": {k: {} for k in "abc"}, "minProperties": 2},
    "capped": {"type": "object", "properties": {k: {} for k in "abc"}, "maxProperties": 1},
    "items": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [{"type": "integer"}, {"const": 1}], "items": False},
    "draft 7 tuple": {"type": "array", "items": [{"type": "integer"}], "minItems": 1},
    "no items": {"type": "array", "maxItems": 0},
    "length": {"type": "string", "minLength": 2, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[a-c]{2,3}-\\d+(x|y)?$"},
    "pattern without anchors": {"type": "string", "pattern": "a.c"},
    "pattern with quotes": {"type": "string", "pattern": '^["\\\\/\\n]+$'},
    "pattern with negation": {"type": "string", "pattern": "^[^a-z\\s]*$"},
    "pattern of alternatives": {"type": "string", "pattern": "^ab|c{2}$"},
    "date": {"type": "string", "format": "date"},
    "date-time": {"type": "string", "format": "date-time"},
    "time": {"type": "string", "format": "time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "email": {"type": "string", "format": "email"},
    "unknown format": {"type": "string", "format": "password"},
    "integer between": {"type": "integer", "minimum": -12, "maximum": 345},
    "integer from": {"type": "integer", "exclusiveMinimum": 17},
    "integer to": {"type": "integer", "maximum": -3},
    "number between": {"type": "number", "minimum": -2.5, "exclusiveMaximum": 31},
    "probability": {"type": "number", "minimum": 0, "maximum": 1},
    "narrow number": {"type": "number", "exclusiveMinimum": 0.1, "maximum": 0.3},
    "enum": {"enum": ["a", 1, None, {"x": [True]}]},
    "enum of a type": {"type": "string", "enum": ["a", 1, "b\"{9999}"]},
    "const": {"const": {"a": 1}},
    "types": {"type": ["string", "null"], "maxLength": 2},
    "implied type": {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
    "anyOf": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
    "anyOf beside": {"type": "object", "properties": {"a": {}, "b": {}},
                     "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
    "oneOf": {"oneOf": [_CAT, _DOG]},
    "allOf": {"allOf": [{"properties": {"a": {"type": "integer"}}, "required": ["a"]},
                        {"properties": {"a": {"minimum": 3}, "b": {"type": "string"}}}]},
    "allOf closed": {"allOf": [{"properties": {"a": {}}, "additionalProperties": False},
                               {"properties": {"a": {"type": "null"}, "b": {}}}]},
    "recursive": {"$ref": "#/$defs/node", "$defs": {"node": _NODE}},
    "recursive root": {"type": "object", "properties": {"child": {"$ref": "#"}}},
    "same last name": {"type": "object", "required": ["x", "y"],
                       "properties": {"x": {"$ref": "#/$defs/a/properties/string"},
                                      "y": {"$ref": "#/$defs/string"}},
                       "$defs": {"a": {"properties": {"string": {"type": "integer"}}},
                                 "string": {"type": "boolean"}}},
    "ref with a neighbour": {"$ref": "#/$defs/n", "maximum": 5,
                             "$defs": {"n": {"type": "integer", "minimum": 1}}},
}  # fmt: skip

BAD: list[tuple[dict[str, Any], str]] = [
    ({"not": {"type": "string"}}, "'not'"),
    ({"if": {}, "then": {}}, "'if'"),
    ({"patternProperties": {"^a": {}}}, "'patternProperties'"),
    ({"propertyNames": {"maxLength": 3}}, "'propertyNames'"),
    ({"dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
    ({"contains": {}}, "'contains'"),
    ({"unevaluatedProperties": False}, "'unevaluatedProperties'"),
    ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
    ({"type": "number", "multipleOf": 0.5}, "'multipleOf'"),
    ({"type": "string", "format": "regex"}, "'format'"),
    ({"type": "string", "pattern": "^(?=a)b$"}, "'pattern'"),
    ({"type": "string", "pattern": "^(a)\\1$"}, "'pattern'"),
    ({"type": "string", "pattern": "\\bword"}, "'pattern'"),
    ({"type": "string", "pattern": "a" * 600}, "'pattern'"),
    ({"type": "string", "pattern": "a{5000}"}, "'pattern'"),
    ({"type": "string", "pattern": "("}, "'pattern'"),
    ({"type": "string", "pattern": "(" * 400}, "'pattern'"),
    ({"type": "string", "pattern": "a", "maxLength": 3}, "'maxLength'"),
    ({"type": "string", "minLength": -1}, "'minLength'"),
    ({"type": "string", "maxLength": 2**63}, "'maxLength'"),
    ({"type": "string", "minLength": 3, "maxLength": 2}, "'maxLength'"),
    ({"type": "integer", "minimum": 2**70}, "'minimum'"),
    ({"type": "integer", "minimum": "1"}, "'minimum'"),
    ({"type": "integer", "minimum": 3, "maximum": 2}, "'minimum'"),
    ({"type": "strnig"}, "'type'"),
    ({"properties": 5}, "'properties'"),
    ({"required": "a"}, "'required'"),
    ({"enum": []}, "'enum'"),
    ({"enum": list(range(2000))}, "'enum'"),
    ({"type": "string", "enum": [1]}, "'enum'"),
    ({"$ref": "https://example.org/schema.json"}, "'$ref'"),
    ({"$ref": "#/$defs/nothing"}, "'$ref'"),
    ({"$ref": "#"}, "'$ref'"),
    ({"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"anyOf": [{"$ref": "#/$defs/a"}]}},
      "$ref": "#/$defs/a"}, "'$ref'"),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "'oneOf'"),
    ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "'type'"),
    ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "'pattern'"),
    ({"properties": {"a": {"items": {"not": {}}}}}, "schema.properties.a.items: 'not'"),
]  # fmt: skip


def grammar_of(schema: dict[str, Any]) -> str:
    grammar = ReplyGrammar("schema")
    grammar.add_json(schema, "")
    return grammar.text(after_thinking=False)


@pytest.mark.parametrize("name", GOOD)
def test_every_text_of_the_grammar_validates(name: str, derive: Any) -> None:
    schema = GOOD[name]
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    version = jsonschema.Draft7Validator if "draft 7" in name else jsonschema.Draft202012Validator
    validator = version(schema, format_checker=checker)
    gbnf = grammar_of(schema)
    for seed in range(40):
        text = derive(gbnf, random.Random(seed))
        validator.validate(json.loads(text))


@pytest.fixture(scope="module")
def vocabulary(model_path: Path) -> LlamaModel:
    return LlamaModel(Load(str(model_path), 512, 256, 256, 1, 0, "f16", "f16", 1))


@pytest.mark.model
@pytest.mark.parametrize("name", GOOD)
def test_llama_cpp_reads_the_grammar_as_it_is_meant(
    name: str, vocabulary: LlamaModel, derive: Any
) -> None:
    gbnf = grammar_of(GOOD[name])
    candidate = Candidates(1)
    grammar = Grammar(vocabulary, gbnf)
    text = derive(gbnf, random.Random(1))
    tokens = vocabulary.tokenize(text, add_special=False, parse_special=False)
    for token in (*map(int, tokens), int(vocabulary.eog[0])):
        candidate.fill_one(token)
        grammar.mask(candidate)
        assert candidate.logits[0] == 0, (text, vocabulary.piece(token, special=True))
        grammar.accept(token)
    grammar.close()


@pytest.mark.parametrize(("schema", "named"), BAD)
def test_what_cannot_be_honoured_is_refused_by_name(schema: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_schema(schema, "schema")
    assert named in caught.value.message and caught.value.param == "schema"


def test_a_schema_nested_too_deeply_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(40):
        schema = {"type": "array", "items": schema}
    with pytest.raises(InvalidRequest, match="32 levels"):
        check_schema(schema, "schema")


def test_a_schema_with_too_many_parts_is_refused() -> None:
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}}
    with pytest.raises(InvalidRequest, match="too many parts"):
        check_schema(wide, "schema")


def test_references_that_multiply_are_refused() -> None:
    defs = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 8} for i in range(12)}
    with pytest.raises(InvalidRequest):
        check_schema({"$ref": "#/$defs/d0", "$defs": {**defs, "d12": {}}}, "schema")


_names = st.sampled_from(["a", "b", "c d", 'e"'])
_leaves = st.one_of(
    st.builds(lambda t: {"type": t}, st.sampled_from(["string", "integer", "number", "null"])),
    st.builds(lambda v: {"const": v}, st.one_of(st.integers(-5, 5), st.text(max_size=3))),
    st.builds(
        lambda a, b: {"type": "integer", "minimum": min(a, b), "maximum": max(a, b)},
        st.integers(-2000, 2000),
        st.integers(-2000, 2000),
    ),
    st.builds(
        lambda a, b: {"type": "number", "minimum": min(a, b), "maximum": max(a, b)},
        st.integers(-300, 300).map(lambda n: n / 10),
        st.integers(-300, 300).map(lambda n: n / 10),
    ),
)


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.builds(
            lambda p, r: {"type": "object", "properties": p, "required": r},
            st.dictionaries(_names, inner, max_size=3),
            st.lists(_names, max_size=2, unique=True),
        ),
        st.builds(
            lambda i, n: {"type": "array", "items": i, "maxItems": n}, inner, st.integers(0, 3)
        ),
        st.builds(lambda a: {"anyOf": a}, st.lists(inner, min_size=1, max_size=3)),
        st.builds(lambda a: {"allOf": a}, st.lists(inner, min_size=1, max_size=2)),
    )


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(schema=st.recursive(_leaves, _nested, max_leaves=8), seed=st.integers(0, 2**16))
def test_any_schema_is_refused_or_kept(schema: dict[str, Any], seed: int, derive: Any) -> None:
    try:
        gbnf = grammar_of(schema)
    except InvalidRequest:
        return
    text = derive(gbnf, random.Random(seed))
    jsonschema.Draft202012Validator(schema).validate(json.loads(text))
