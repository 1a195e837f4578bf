"""The command line: generated flags, exit codes, one line per mistake, and what stays unimported."""

import json
import os
import subprocess
import sys
from typing import Annotated

import pytest
import typer

from specplug import cli
from specplug.cli import flags
from specplug.errors import UserError
from specplug.options import EngineOptions
from specplug.registry import Registry
from specplug.runtime.memory import DeviceMemory
from specplug.spec import Checkpoint, Facts
from specplug.testing.stubs import Stub, stub_registry

OPTIONS = """
from collections.abc import Mapping
from pydantic import Field

class Own(SpecConfig):
    acme_depth: int = Field(4, ge=1, le=9, description="how deep")
    acme_shared: bool = Field(False, description="share it")
    acme_lengths: tuple[int, ...] = Field((1,), description="which lengths")
    acme_table: Mapping[str, int] = Field(default_factory=dict, description="costs")

SpecConfig = Own
"""

FOREIGN = """
_sound = [specplug_algorithms]

@hookimpl
def specplug_algorithms():
    options = {"speculative_acme_width": "write --speculative-acme-depth"}
    return [spec.model_copy(update={"foreign_options": options}) for spec in _sound[0]()]
"""

ACME = Stub("acme-lookup", version="1.2", algorithms=["lookup"], aliases={"lookup": ["find"]}, extra=OPTIONS + FOREIGN)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}
OTHER = Stub("other-guess", algorithms=["guess"], instead={"gues": "guess"})
BROKEN = Stub("bad-one", algorithms=["bad"], fault="import-error")


class Shell:
    """Runs commands in process, against the stubs and nothing else."""

    def __init__(self, capsys):
        self.capsys = capsys
        self.seen = None

    def __call__(self, *args):
        self.seen = None
        code = cli.main(list(args))
        out, err = self.capsys.readouterr()
        return code, out, err

    def refused(self, *args):
        code, out, err = self(*args)
        assert code == 2
        assert "Traceback" not in out + err
        lines = [line for line in err.splitlines() if not line.startswith("warning: bad-one")]
        assert lines[0].startswith("error: ")
        return "\n".join(lines).removeprefix("error: ")


@pytest.fixture
def shell(tmp_path, capsys, monkeypatch):
    """A shell whose extra command ``try`` has all shared options and remembers what it was given."""
    shell = Shell(capsys)

    def register(app, registry):
        @flags.speculative_command(app, registry, "try")
        def attempt(
            model: str,
            options: EngineOptions,
            algorithm: str,
            given: dict[str, object],
            prompt: Annotated[list[str] | None, typer.Option(help="what to ask")] = None,
        ) -> None:
            """Remember the arguments."""
            shell.seen = (model, options, algorithm, given, prompt)

    module = type(sys)("try_command")
    module.register = register
    monkeypatch.setitem(sys.modules, "try_command", module)
    monkeypatch.setitem(cli.COMMANDS, "try", "try_command")
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    with stub_registry(tmp_path, ACME, OTHER, BROKEN) as registry:
        monkeypatch.setattr(Registry, "discover", classmethod(lambda cls: registry))
        yield shell


# --- flags -----------------------------------------------------------------------------------------------------------


def test_everything_typed_arrives(shell):
    code, _, err = shell(
        "try", "folder", "--prompt", "a", "--prompt", "b", "--page-size", "32", "--trust-remote-code",
        "--speculative-algorithm", "Lookup", "--speculative-acme-depth", "5", "--speculative-acme-shared",
        "--speculative-draft-model", "draft", "--speculative-config", '{"acme_table": {"1": 2}}',
    )  # fmt: skip
    assert code == 0
    assert [line[:25] for line in err.splitlines()] == ["warning: bad-one 1.0 is br"[:25]]
    model, options, algorithm, given, prompt = shell.seen
    assert (model, algorithm, prompt) == ("folder", "Lookup", ["a", "b"])
    assert options == EngineOptions(page_size=32, trust_remote_code=True, speculative_draft_model_path="draft")
    assert given == {"acme_depth": "5", "acme_shared": True, "acme_table": {"1": 2}}


def test_nothing_typed_is_plain_decoding_with_defaults(shell):
    assert shell("try", "folder")[0] == 0
    assert shell.seen == ("folder", EngineOptions(), "none", {}, None)


def test_a_switch_can_be_turned_off_and_left_alone(shell):
    shell("try", "m", "--no-speculative-acme-shared", "--no-trust-remote-code")
    assert shell.seen[3] == {"acme_shared": False}


def test_every_engine_option_is_a_flag(shell):
    out = shell("try", "--help")[1]
    for field in EngineOptions.model_fields:
        assert "--" + field.replace("_", "-") in out


def test_model_path_is_another_way_to_write_model(shell):
    shell("try", "--model-path", "folder")
    assert shell.seen[0] == "folder"
    assert shell("try", "folder", "--model-path", "folder")[0] == 0
    assert "differ" in shell.refused("try", "a", "--model-path", "b")
    assert "MODEL is missing" in shell.refused("try")
    assert "MODEL '' is empty" in shell.refused("try", "")


def test_bad_engine_options_are_one_line_each(shell):
    lines = shell.refused("try", "m", "--page-size", "0", "--dtype", "float8").splitlines()
    assert sorted(line.removeprefix("error: ") for line in lines) == [
        "--dtype float8: must be one of auto, float32, bfloat16, float16",
        "--page-size 0: must be a whole number from 1 to 256",
    ]
    assert shell.seen is None


def test_require(shell):
    assert shell("try", "m", "--require", "acme-lookup>=1", "--require", "other-guess")[0] == 0
    assert "acme-lookup" in shell.refused("try", "m", "--require", "acme-lookup>=2")
    assert shell.seen is None


def test_a_command_must_take_the_shared_arguments_and_no_other_of_that_name():
    registry = Registry.discover(path=[], environ={})

    def lacks(model, options, algorithm):
        """Nothing."""

    def redefines(model, options, algorithm, given, page_size=1):
        """Nothing."""

    with pytest.raises(TypeError, match="given"):
        flags.speculative_command(typer.Typer(), registry, "x")(lacks)
    with pytest.raises(TypeError, match="page_size"):
        flags.speculative_command(typer.Typer(), registry, "x")(redefines)


@pytest.mark.parametrize(
    ("word", "rule", "mean"),
    [
        ("auto", "coupled", 0.0), ("coupled", "coupled", 0.0), ("rejection", "rejection", 0.0),
        ("synthetic:1", "synthetic", 1.0), ("synthetic:2.5", "synthetic", 2.5),
    ],
)  # fmt: skip
def test_acceptance_is_a_rule_and_a_mean(shell, word, rule, mean):
    code, _, err = shell("try", "m", "--speculative-acceptance", word)
    options = shell.seen[1]
    assert (code, options.acceptance, options.acceptance_mean) == (0, rule, mean)
    # What is lossy is said before anything is loaded, and nothing else is.
    assert (f"warning: --speculative-acceptance {word} is lossy" in err) == (rule == "synthetic")
    assert bool(options.lossy) == (rule == "synthetic")


@pytest.mark.parametrize(
    "word", ["synthetic", "synthetic:", "synthetic:0.99", "synthetic:nan", "synthetic:inf", "synthetic:-2", "Coupled"]
)
def test_a_bad_acceptance_names_every_form(shell, word):
    line = shell.refused("try", "m", "--speculative-acceptance", word)
    assert line == (
        f"--speculative-acceptance {word}: must be one of auto, coupled, rejection, or synthetic:LEN with LEN at "
        "least 1, such as synthetic:2.5"
    )


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("--device", "tpu", "one of auto, cpu, cuda"),
        ("--attention-backend", "flash", "one of auto, torch, flashinfer, paged"),
        ("--load-format", "none", "one of auto, dummy"),
        ("--speculative-draft-load-format", "none", "one of auto, dummy"),
        ("--max-cuda-graphs", "0", "a whole number, at least 1"),
        ("--mem-fraction-static", "0", "a number, above 0 and below 1"),
        ("--mem-fraction-static", "1", "a number, above 0 and below 1"),
        ("--mem-fraction-static", "nan", "a number, above 0 and below 1"),
    ],
)
def test_a_devices_options_have_ranges(shell, option, value, says):
    assert shell.refused("try", "m", option, value) == f"{option} {value}: must be {says}"


# --- --speculative-config --------------------------------------------------------------------------------------------


def test_config_from_a_file(shell, tmp_path):
    file = tmp_path / "options.json"
    file.write_text('{"acme_depth": 3}', encoding="utf-8")
    shell("try", "m", "--speculative-config", f"@{file}")
    assert shell.seen[3] == {"acme_depth": 3}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "not valid JSON at line 1, column 2"),
        ("[1]", "give a JSON object"),
        ("3", "give a JSON object"),
        ('{"a": 1, "a": 2}', "the name 'a' stands there twice"),
        ("@no/such/file.json", "cannot read the file (No such file or directory)"),
        ("@", "cannot read the file"),
        ("", "not valid JSON"),
    ],
)
def test_a_bad_config_is_one_line(shell, text, says):
    line = shell.refused("try", "m", "--speculative-config", text)
    assert line.startswith("--speculative-config ")
    assert says in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("config", "typed", "same"),
    [
        ('{"acme_depth": 5}', ["--speculative-acme-depth", "5"], True),
        ('{"acme_depth": 5}', ["--speculative-acme-depth", "6"], False),
        ('{"acme_depth": "5"}', ["--speculative-acme-depth", "5"], True),
        ('{"acme_depth": 5}', ["--speculative-acme-depth", "deep"], False),
        ('{"acme_shared": true}', ["--speculative-acme-shared"], True),
        ('{"acme_shared": 1}', ["--speculative-acme-shared"], False),
        ('{"acme_shared": false}', ["--speculative-acme-shared"], False),
        ('{"acme_lengths": [1, 2]}', ["--speculative-acme-lengths", "1, 2"], True),
        ('{"acme_lengths": [1, 2]}', ["--speculative-acme-lengths", "[1,2]"], True),
        ('{"acme_lengths": [1, 2]}', ["--speculative-acme-lengths", "2,1"], False),
    ],
)
def test_a_field_given_twice_must_agree(shell, config, typed, same):
    args = ["try", "m", "--speculative-config", config, *typed]
    if same:
        assert shell(*args)[0] == 0
    else:
        line = shell.refused(*args)
        assert typed[0] in line
        assert "differ" in line


# --- options nobody has ----------------------------------------------------------------------------------------------


def test_unknown_options(shell):
    assert "the nearest is --speculative-acme-depth" in shell.refused("try", "m", "--speculative-acme-deph", "3")
    assert "no installed algorithm has it (installed: guess, lookup)" in shell.refused(
        "try", "m", "--speculative-zzz=3"
    )
    foreign = shell.refused("try", "m", "--speculative-acme-width", "3")
    assert foreign == "--speculative-acme-width is not an option of 'lookup': write --speculative-acme-depth"


def test_an_option_of_a_package_that_is_not_here_says_what_to_install(shell):
    line = shell.refused("try", "m", "--speculative-algorithm", "EAGLE", "--speculative-eagle-topk", "8")
    assert "--speculative-eagle-topk" in line
    assert "pip install specplug-eagle" in line
    assert "write --speculative-acme-depth" not in shell.refused("doctor", "EAGLE", "--speculative-acme-width", "8")


@pytest.mark.parametrize(
    "args", [["tri"], ["try", "a", "b"], ["try", "m", "--page-size"], ["plugins", "--jsno"], ["-x"]]
)
def test_what_the_parser_refuses_is_one_line(shell, args):
    assert "\n" not in shell.refused(*args)


# --- help ------------------------------------------------------------------------------------------------------------


def test_help_lists_an_algorithms_options_when_it_is_named(shell, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    code, plain, _ = shell("try", "--help")
    assert code == 0
    assert "--speculative-acme-depth" not in plain
    assert "--speculative-draft-model-revision" in plain
    assert "guess, lookup" in " ".join(plain.split())
    for args in (["--speculative-algorithm", "FIND"], ["--speculative-algorithm=lookup"]):
        named = shell("try", *args, "--help")[1]
        assert "Options of lookup:" in named
        assert "--speculative-acme-shared / --no-speculative-acme-shared" in named
        assert "how deep [a whole number from 1 to 9; default 4]" in " ".join(named.split())
        assert "--speculative-acme-table" not in named
    assert "Options of lookup:" in shell("doctor", "lookup", "--help")[1]
    assert "acme" not in shell("try", "--speculative-algorithm", "guess", "--help")[1]


def test_top_level_help_lists_every_command(shell):
    code, out, _ = shell("--help")
    assert code == 0
    assert all(name in out for name in cli.COMMANDS)


# --- plugins ---------------------------------------------------------------------------------------------------------


def test_plugins_lists_every_state(shell):
    code, out, err = shell("plugins")
    assert code == 0
    rows = {line.split()[0]: line for line in out.splitlines() if line[:1].strip()}
    assert "acme-lookup 1.2" in rows["lookup"]
    assert "loaded" in rows["lookup"]
    assert "broken" in rows["bad"]
    assert "warning: bad-one 1.0" in err
    assert "Traceback" not in out
    assert "Traceback" in shell("plugins", "-v")[1]


def test_plugins_json(shell):
    code, out, _ = shell("plugins", "--json")
    found = json.loads(out)
    by_name = {plugin["name"]: plugin for plugin in found["plugins"]}
    assert code == 0
    assert by_name["lookup"]["algorithms"][0]["aliases"] == ["find"]
    assert "acme_depth" in by_name["lookup"]["algorithms"][0]["options"]
    assert by_name["bad"]["state"] == "broken"
    assert any("bad-one" in warning for warning in found["warnings"])


def test_plugins_of_a_bare_core(capsys, monkeypatch):
    monkeypatch.setattr(
        Registry, "discover", classmethod(lambda cls, real=Registry.discover: real(path=[], environ={}))
    )
    assert cli.main(["plugins"]) == 0
    assert "no plugin is installed" in capsys.readouterr().out


# --- doctor ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def model(monkeypatch):
    """A module of facts that knows one model, so that no weights are needed; with a revision it has a config."""
    module = type(sys)("specplug.facts")

    def build_facts(path: str, options: EngineOptions, *, draft_files: object = (), elsewhere: bool = False) -> Facts:
        if path != "folder":
            raise UserError(f"MODEL {path}: not found")
        return Facts(
            target=Checkpoint(path=path, config=CONFIG if options.revision else {}),
            device="cuda" if options.device == "cuda" and elsewhere else "cpu",
            page_size=options.page_size,
            features=frozenset({"rollback"}),
        )

    module.build_facts = build_facts
    monkeypatch.setitem(sys.modules, "specplug.facts", module)


def test_doctor_checks_a_name(shell):
    code, out, err = shell("doctor", "Find")
    assert code == 0
    assert "acme-lookup 1.2" in out
    assert "usable: lookup by name" in out
    assert "warning: bad-one" in err
    assert shell("doctor", "--speculative-algorithm", "find")[0] == 0


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["MTP"], "is no value: write nextn"),
        (["EAGLE"], "pip install specplug-eagle"),
        (["bad"], "bad-one 1.0 is broken"),
        (["lokup"], "did you mean 'lookup'"),
        (["gues"], "write guess"),
        ([], "NAME is missing"),
        ([""], "NAME '' is empty"),
        (["lookup", "--speculative-algorithm", "guess"], "differ"),
        (["lookup", "--speculative-acme-depth", "3"], "--speculative-acme-depth cannot be checked without MODEL"),
    ],
)
def test_doctor_refuses(shell, args, says):
    assert says in shell.refused("doctor", *args)


def test_doctor_settles_the_whole_run(shell, model):
    code, out, _ = shell("doctor", "lookup", "folder", "--speculative-num-draft-tokens", "4")
    assert code == 0
    assert "--speculative-num-draft-tokens = 4 (user)" in out
    assert "--speculative-acme-depth = 4 (default)" in out
    assert "plan: 3 drafts" in out
    assert "usable: lookup with folder" in out


def test_doctor_refuses_with_the_trace(shell, model):
    code, out, err = shell("doctor", "lookup", "folder", "--speculative-acme-depth", "12")
    assert code == 2
    assert "acme-lookup 1.2" in out
    assert "error: --speculative-acme-depth 12: must be a whole number from 1 to 9" in err
    assert "has no option --speculative-acme-depth; lookup has it" in shell.refused(
        "doctor", "guess", "folder", "--speculative-acme-depth", "3"
    )
    assert "nowhere: not found" in shell.refused("doctor", "lookup", "nowhere")


def test_doctor_json(shell, model):
    code, out, _ = shell("doctor", "lookup", "folder", "--json", "--page-size", "8")
    found = json.loads(out)
    assert code == 0
    assert (found["usable"], found["algorithm"], found["distribution"]) == (True, "lookup", "acme-lookup")
    assert found["plan"]["nodes"] == 1
    assert {s["field"]: s["source"] for s in found["settings"]}["acme_depth"] == "default"
    code, out, err = shell("doctor", "MTP", "--json")
    found = json.loads(out)
    assert (code, found["usable"]) == (2, False)
    assert "nextn" in found["error"]
    assert "error" not in err  # it is in the object


def test_doctor_of_a_plain_model(shell, model):
    code, out, _ = shell("doctor", "--model-path", "folder")
    assert code == 0
    assert "usable: none with folder" in out


def test_doctor_says_where_a_run_goes_and_what_it_takes(shell, model):
    code, out, _ = shell("doctor", "lookup", "folder", "--revision", "r", "--context-length", "100")
    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "device cpu, float32, attention torch" in lines
    assert "graphs of the target: none on a CPU" in lines
    assert "weights 539.2 KiB" in lines  # 64,000 of the embedding, 36,992 a layer, 64: 4 bytes each
    assert "KV pages 408.0 KiB 800 tokens in 50 pages of 16" in lines  # 512 bytes a token, and the trash page
    assert lines.index("usable: lookup with folder") == len(lines) - 1


def test_doctor_of_a_model_whose_kv_is_not_known_before_loading(shell, model):
    lines = [" ".join(line.split()) for line in shell("doctor", "none", "folder")[1].splitlines()]
    assert "KV pages not known before loading" in lines


def test_doctor_for_a_device_that_is_not_here(shell, model, monkeypatch):
    monkeypatch.setattr("specplug.cli.doctor.device_memory", lambda device: None)
    code, out, _ = shell("doctor", "lookup", "folder", "--revision", "r", "--device", "cuda")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 0
    assert "device cuda (not on this machine), float32, attention torch" in lines
    assert "graphs of the target: decided by a trial capture at start" in lines
    assert "KV pages not known: the device is not here" in lines
    assert "weights 539.2 KiB" in lines
    off = shell("doctor", "lookup", "folder", "--revision", "r", "--device", "cuda", "--disable-cuda-graph")[1]
    assert "graphs of the target: off, as --disable-cuda-graph says" in off


def test_doctor_sizes_the_pool_of_a_device_that_is_here(shell, model, monkeypatch):
    monkeypatch.setattr("specplug.cli.doctor.device_memory", lambda device: DeviceMemory(4 * 2**30, 4 * 2**30))
    args = ("doctor", "none", "folder", "--revision", "r", "--device", "cuda")
    code, out, _ = shell(*args, "--json")
    memory = json.loads(out)["memory"]
    assert (code, memory["total"], memory["tokens"]) == (0, 4 * 2**30, 8 * 256)
    assert memory["free"] == 4 * 2**30 - sum(memory[part] for part in ("weights", "kv", "graphs", "activations"))
    # As the start would: refused, with the number to change.
    line = shell.refused(*args, "--mem-fraction-static", "0.1")
    assert "leaves no room for KV" in line
    assert "raise --mem-fraction-static 0.1 to 0.38" in line


def test_doctor_tells_that_a_run_is_lossy(shell, model):
    code, out, err = shell("doctor", "lookup", "folder", "--speculative-acceptance", "synthetic:2", "--json")
    found = json.loads(out)
    assert (code, found["lossy"], "about" in found) == (0, True, False)
    assert any("synthetic:2 is lossy" in warning for warning in found["warnings"])
    assert err.count("is lossy") == 1
    assert json.loads(shell("doctor", "lookup", "folder", "--json")[1])["lossy"] is False


# --- the process -----------------------------------------------------------------------------------------------------


def fresh(*args, **environ):
    """Run the command in a process of its own; the last line of stdout is what it imported."""
    code = (
        "import sys, os\nfrom specplug.cli import main\nrc = main(sys.argv[1:])\n"
        "print(rc, 'torch' in sys.modules, 'transformers' in sys.modules, os.environ['OMP_WAIT_POLICY'])"
    )
    env = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "SPECPLUG_PLUGINS")} | environ
    found = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, env=env, timeout=60)
    assert found.returncode == 0, found.stderr
    return found.stdout.splitlines()[-1].split(), found.stderr


@pytest.mark.parametrize("args", [["plugins"], ["plugins", "--json"], ["--help"], ["doctor", "--help"], ["estimate"]])
def test_light_commands_leave_torch_unimported(args):
    (code, torch, transformers, policy), _ = fresh(*args)
    assert code == ("2" if args == ["estimate"] else "0")
    assert (torch, transformers) == ("False", "False")
    assert policy == "PASSIVE"


def test_doctor_on_a_bare_core_says_what_to_write_instead():
    """No plugin at all: the words come from the catalogue."""
    (code, torch, _, _), err = fresh("doctor", "MTP", SPECPLUG_PLUGINS="")
    assert (code, torch) == ("2", "False")
    assert "write nextn" in err


def test_the_users_wait_policy_wins():
    assert fresh("--version", OMP_WAIT_POLICY="ACTIVE")[0][3] == "ACTIVE"


def test_version_answers_even_with_a_wrong_allow_list():
    assert fresh("--version", SPECPLUG_PLUGINS="not-there")[0][0] == "0"
    (code, *_), err = fresh("plugins", SPECPLUG_PLUGINS="not-there")
    assert code == "2"
    assert err.startswith("error: SPECPLUG_PLUGINS='not-there'")
    assert err.count("\n") == 1
