"""`response_format`: what may be written, what is refused by name, and what it compiles to."""

import json
import threading

import pytest

from specplug.errors import UserError
from specplug.grammar import compile as compiling
from specplug.grammar.compile import Compiler, compiler_for
from specplug.grammar.format import LARGEST, checked, schema_text
from specplug.runtime.engine import Engine
from specplug.runtime.intake import as_params
from specplug.sampling import SamplingParams
from specplug.testing.targets import table_target
from specplug.testing.tokenizer import EOS, SIZE, byte_tokenizer


def schema(of, **more):
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": of, **more}}


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def test_formats_that_ask_for_nothing_are_none():
    assert checked(None) is None
    assert checked({"type": "text"}) is None
    assert SamplingParams(response_format={"type": "text"}).response_format is None


@pytest.mark.parametrize(
    "given",
    [{"type": "json_object"}, schema({"type": "integer"}), schema(True, strict=None), schema({}, strict=True)],
)
def test_formats_of_the_api_are_taken_as_they_are(given):
    assert SamplingParams(response_format=given).response_format == given


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("json", "must be an object"),
        ({"type": "grammar"}, "'grammar' is not known"),
        ({}, "None is not known"),
        ({"type": "json_schema"}, "needs"),
        ({"type": "json_schema", "json_schema": {"name": "x"}}, "needs"),
        ({"type": "json_schema", "json_schema": {"schema": "{}"}}, "needs"),
        ({"type": "json_object", "schema": {}}, "schema is not known"),
        ({"type": "text", "json_schema": {}}, "json_schema is not known"),
        (schema({}, tools=1), "json_schema.tools is not known"),
        (schema({}, strict="yes"), "strict must be"),
        (schema({}, name=3), "name must be text"),
        (schema({"enum": [object()]}), "no JSON"),
        (schema({"const": "x" * LARGEST}), f"may have {LARGEST}"),
    ],
)
def test_what_cannot_be_meant_is_one_line_that_names_it(given, says):
    with pytest.raises(UserError) as caught:
        as_params({"response_format": given})
    line = str(caught.value)
    assert line.startswith("response_format")
    assert says in line
    assert "\n" not in line


def test_properties_keep_the_order_in_which_they_were_written():
    text = schema_text(schema({"properties": {"z": {}, "a": {}}}))
    assert text.index('"z"') < text.index('"a"')  # breaks with sort_keys
    assert json.loads(schema_text({"type": "json_object"})) == {"type": "object"}


@pytest.mark.parametrize(
    "of",
    [
        {"type": "objec"},
        {"type": "string", "pattern": "["},
        {"$ref": "#/nowhere"},
        {"$ref": "http://127.0.0.1/schema"},
        {"if": {}, "then": {}},
        {"type": "array", "uniqueItems": True},
        {"enum": []},
        False,
        {"type": "integer", "minimum": 5, "maximum": 3},
    ],
)
def test_a_schema_that_cannot_be_kept_to_is_refused_in_one_line(of, tokenizer):
    with pytest.raises(UserError, match=r"^response_format: the schema cannot be kept to: [^\n]+$"):
        compiler_for(tokenizer, SIZE, (EOS,)).grammar(schema(of))


def test_a_schema_of_any_depth_is_refused_or_taken_but_never_fatal(tokenizer):
    deep: dict = {"type": "integer"}
    for _ in range(400):
        deep = {"type": "array", "items": deep}
    with pytest.raises(UserError, match="response_format"):
        compiler_for(tokenizer, SIZE, (EOS,)).grammar(schema(deep))


def test_a_schema_is_compiled_once_and_each_grammar_begins_anew(tokenizer, monkeypatch):
    compiler, made = Compiler(tokenizer, SIZE, (EOS,)), []
    real = compiler._compile
    monkeypatch.setattr(compiler, "_compile", lambda text: made.append(text) or real(text))
    one = compiler.grammar(schema({"const": "ab"}))
    one.commit(list(b'"a'))
    two = compiler.grammar(schema({"const": "ab"}))
    assert len(made) == 1
    two.commit(list(b'"ab"'))  # breaks with a matcher that is shared
    assert two.ended
    assert not one.ended
    assert not one.error


def test_old_schemas_are_forgotten(tokenizer):
    compiler = Compiler(tokenizer, SIZE, (EOS,))
    for number in range(compiling.KEPT + 9):
        compiler.grammar(schema({"const": number}))
    assert len(compiler._matchers) == compiling.KEPT


def test_two_threads_compile_at_once(tokenizer):
    found, threads = [], []
    for number in range(4):
        work = threading.Thread(
            target=lambda n=number: found.append(compiler_for(tokenizer, SIZE, (EOS,)).grammar(schema({"const": n})))
        )
        threads.append(work)
        work.start()
    for work in threads:
        work.join()
    assert len(found) == 4
    assert len({id(grammar.matcher) for grammar in found}) == 4


def test_a_model_that_cannot_honour_it_says_so():
    wanted = {"response_format": {"type": "json_object"}}
    for target, options, says in (
        (table_target(SIZE, eos=EOS), wanted, "needs a tokenizer"),
        (table_target(SIZE, tokenizer=byte_tokenizer()), wanted, "names no eos_token_id"),
        (table_target(SIZE, tokenizer=byte_tokenizer(), eos=EOS), wanted | {"ignore_eos": True}, "ignore_eos"),
    ):
        with Engine(target) as engine, pytest.raises(UserError, match=says):
            engine.generate([[1, 2]], options)


def test_without_the_package_the_error_says_what_to_install(tokenizer, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(UserError, match=r"pip install 'specplug\[serve\]'"):
        Compiler(tokenizer, SIZE, (EOS,))


def test_a_model_with_more_ids_than_its_tokenizer_never_says_them(tokenizer):
    grammar = Compiler(tokenizer, SIZE + 100, (EOS, 0, SIZE + 50)).grammar(schema({"const": 1}))
    grammar.commit(list(b"1"))
    assert grammar.ended
    from specplug.grammar.masks import Looked, fill, unpacked

    mask = unpacked(fill([Looked(grammar, (), ())], [1]), SIZE + 100)[0]
    assert mask.nonzero().flatten().tolist() == [0, EOS]
