"""The documentation is run, not believed.

- Every ```python block of README.md and docs/ runs: those of a page in order, in one namespace, in an empty folder.
  `await` may stand at the top level. A block that begins with `# name.py`, or `# folder/name.py`, is a file, which the
  page must then use; so is a block of JSON or TOML, under a line that ends with its name: "… `monday.toml`:".
- On a page with files, `$ python …` and `$ fairlane …` run as well, a worker in the background, and must print what the
  page shows (`…` stands for anything, further lines too). On other pages the command and its options must exist.
- `<!-- docs: worker -->` on a page: a worker serves its `app` meanwhile. `<!-- docs: postgres -->`: DATABASE_URL and
  FAIRLANE_URL name an empty PostgreSQL database.
- A block that cannot run says so above itself, for every reader to see: `*(Not run by the tests: the reason.)*`
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import click
import pytest

from bench import comparison
from fairlane import App
from fairlane.cli.options import LookingGroup
from fairlane.cli.program import program
from fairlane.store.postgres.grants import grants

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
OF_THE_ROOT = [ROOT / f"{name}.md" for name in ("ARCHITECTURE", "CONTRIBUTING", "README", "SECURITY")]
PAGES = [*OF_THE_ROOT, *sorted(DOCS.rglob("*.md"))]
COMMANDS = DOCS / "reference" / "commands.md"

LANGUAGES = {"console", "ini", "json", "python", "sql", "text", "toml"}
FOREIGN = {
    ".",
    ".venv/bin/pip",
    "celery",
    "curl",
    "dramatiq",
    "export",
    "make",
    "pgq",
    "procrastinate",
    "python3",
    "redis-cli",
    "rq",
}
"""Programs that a page may call and that are not ours to run."""
NOT_RUN = re.compile(r"\*\(Not run by the tests: (\S.{9,})\)\*\Z")
WATCHDOG = 60.0


@dataclass(frozen=True)
class Block:
    language: str
    text: str
    line: int
    """Of its first line, counted from 1."""
    left_out: bool
    above: str = ""
    """The last line before it."""

    @property
    def file(self) -> str | None:
        found = None
        if self.language == "python":
            found = re.match(r"# ((?:\w+/)*\w+\.py)\n", self.text)
        elif self.language in ("json", "toml"):
            found = re.search(rf"`(\w+\.{self.language})`:\Z", self.above)
            assert found, f"line {self.line}: above it, say which file this is: `name.{self.language}`:"
        return found[1] if found else None


def blocks(text: str) -> Iterator[Block]:
    lines, last = text.split("\n"), ""
    number = 0
    while number < len(lines):
        if (fence := re.match(r"```(\w*)", lines[number])) is None:
            last, number = lines[number].strip() or last, number + 1
            continue
        end = lines.index("```", number + 1)
        body = "\n".join(lines[number + 1 : end]) + "\n"
        assert fence[1] in LANGUAGES, f"line {number + 1}: nobody looks at a block of {fence[1] or 'no language'}"
        yield Block(fence[1], body, number + 2, left_out=NOT_RUN.match(last) is not None, above=last)
        last, number = "", end + 1


def commands(block: Block) -> Iterator[tuple[list[str], list[str]]]:
    """The commands of a console block, each with the lines that it is said to print."""
    words: list[str] = []
    said: list[str] = []
    for line in block.text.splitlines():
        if line.startswith("$ "):
            if words:
                yield words, said
            words, said = shlex.split(line[2:], comments=True), []
        else:
            said.append(line)
    if words:
        yield words, said


def check_command(words: list[str]) -> None:
    """Fail unless this is a command of ours with options that it has, or of a program that a page may call."""
    match words:
        case ["fairlane", *rest]:
            command: click.Command = program
            context: click.Context | None = None
            while isinstance(command, click.Group):
                context = click.Context(command, context, command.name, **command.context_settings)
                rest = command.completed(context, rest) if isinstance(command, LookingGroup) else rest
                found = command.get_command(context, rest[0]) if rest else None
                assert found is not None, f"there is no command {shlex.join(words)!r}"
                command, rest = found, rest[1:]
            try:
                command.make_context(command.name, list(rest), context)
            except click.UsageError as error:
                raise AssertionError(f"{shlex.join(words)}: {error.format_message()}") from None
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"make {target}"
        case [".venv/bin/python", "-m", "bench", *rest]:
            try:
                comparison.main([*rest, "--list"])
            except SystemExit as error:
                raise AssertionError(f"{shlex.join(words)}: the benchmark refuses it") from error
        case [".venv/bin/python", "-m", "pytest", *rest]:
            absent = [file for file in rest if file.startswith("tests/") and not (ROOT / file).exists()]
            assert not absent, f"{shlex.join(words)}: there is no {absent[0]}"
        case [name, *_]:
            assert name in FOREIGN | {"python"}, f"{shlex.join(words)!r} is checked by nobody"


@dataclass
class Stage:
    """Runs one page."""

    page: Path
    has_files: bool
    serves: bool
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "__page__"})
    unused: set[str] = field(default_factory=set)
    worker: subprocess.Popen[str] | None = None
    apps: list[App] = field(default_factory=list)

    async def run(self, all_blocks: list[Block]) -> None:
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._leave)
            for block in all_blocks:
                await self._play(block)
                if self.serves and isinstance(app := self.names.get("app"), App):
                    await stack.enter_async_context(working(app))
                    self.serves = False
            self._stop_worker()
            assert not self.unused, f"nothing on {self.page.name} uses {self.unused}"

    async def _play(self, block: Block) -> None:
        if block.left_out:
            return
        self.unused = {name for name in self.unused if Path(name).stem not in block.text}
        if block.file:
            Path(block.file).parent.mkdir(parents=True, exist_ok=True)
            Path(block.file).write_text(block.text)
            assert block.file not in self.unused
            self.unused.add(block.file)
        elif block.language == "python":
            await self._execute(block)
        elif block.language == "ini":
            for command in re.findall(r"^ExecStart=\S*/(fairlane .+)$", block.text, re.MULTILINE):
                check_command(shlex.split(command))
        elif block.language == "console":
            for words, said in commands(block):
                check_command(words)
                if self.has_files and words[0] in ("python", "fairlane"):
                    self._call(words, said)

    async def _execute(self, block: Block) -> None:
        # Moved down to its own line, so that a traceback points into the page.
        text = "\n" * (block.line - 1) + block.text
        code = compile(text, str(self.page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        made = eval(code, self.names)
        try:
            if inspect.iscoroutine(made):
                await asyncio.wait_for(made, WATCHDOG)
        finally:
            # Now: the next block may give its name to another.
            self.apps += [value for value in self.names.values() if isinstance(value, App)]

    def _call(self, words: list[str], said: list[str]) -> None:
        ours = [sys.executable, "-m", "fairlane.cli"] if words[0] == "fairlane" else [sys.executable]
        command = [*ours, *words[1:]]
        if words[:2] == ["fairlane", "worker"]:
            self._stop_worker()
            self.worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            return
        done = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG, check=False)
        assert done.returncode == 0, f"{shlex.join(words)}:\n{done.stdout}{done.stderr}"
        expected = ".*".join(re.escape(part) for part in "\n".join(said).strip().split("…"))
        assert re.fullmatch(expected, done.stdout.strip(), re.DOTALL), f"{shlex.join(words)} printed:\n{done.stdout}"

    def _stop_worker(self) -> None:
        """As a reader does: Ctrl-C. A worker that does not end well is a fault of the page, or of the worker."""
        worker, self.worker = self.worker, None
        if worker is None:
            return
        worker.send_signal(signal.SIGINT)
        try:
            log, _ = worker.communicate(timeout=WATCHDOG)
        finally:
            worker.kill()
        assert worker.returncode == 0, f"the worker ended with status {worker.returncode}:\n{log}"

    async def _leave(self) -> None:
        if self.worker is not None:
            self.worker.kill()
            self.worker.communicate()
        for app in [*self.apps, *_apps_of_modules(Path.cwd())]:
            await app.close()


def _apps_of_modules(folder: Path) -> list[App]:
    """Those of the files that a page has imported from its folder."""
    found = [each for each in sys.modules.values() if Path(getattr(each, "__file__", None) or "/").parent == folder]
    return [value for module in found for value in vars(module).values() if isinstance(value, App)]


@contextlib.asynccontextmanager
async def working(app: App) -> AsyncIterator[None]:
    """A worker in this process."""
    worker = await app.worker()
    running = asyncio.create_task(worker.run())
    try:
        yield
    finally:
        worker.stop()
        await running


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty current folder, from which modules can be imported, in an environment that names no database."""
    known = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    for name in ("FAIRLANE_URL", "DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    yield tmp_path
    for name in set(sys.modules) - known:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == tmp_path:
            del sys.modules[name]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "README.md" or page.parent == DOCS], ids=named)
def test_what_a_page_shows_runs(
    page: Path, folder: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = page.read_text()
    if "<!-- docs: postgres -->" in text:
        for name in ("FAIRLANE_URL", "DATABASE_URL"):
            monkeypatch.setenv(name, request.getfixturevalue("empty_postgres_url"))
    found = list(blocks(text))
    stage = Stage(page, any(block.file for block in found), serves="<!-- docs: worker -->" in text)
    asyncio.run(stage.run(found))


def test_the_example_of_the_readme_prints_what_it_says(folder: Path) -> None:
    text = (ROOT / "README.md").read_text()
    said = re.search(r"`(fairlane worker \S+)`, and the program with\s+`(python \S+)`: it prints (\S+)\.", text)
    assert said, "README.md does not say how to run its example any more"
    page = "".join(f"```{block.language}\n{block.text}```\n" for block in blocks(text))
    page += f"```console\n$ {said[1]}\n$ {said[2]}\n{said[3]}\n```\n"
    asyncio.run(Stage(ROOT / "README.md", has_files=True, serves=False).run(list(blocks(page))))


def test_a_broken_page_is_noticed(folder: Path) -> None:
    def play(text: str) -> None:
        asyncio.run(Stage(Path("page.md"), "# a.py" in text, serves=False).run(list(blocks(text))))

    play("```python\nimport asyncio\nawait asyncio.sleep(0)\n```\n")
    play("```python\n# a.py\nprint(42)\n```\n```console\n$ python a.py\n4…\n```\n")
    play("*(Not run by the tests: it needs a printer.)*\n\n```python\nprinter.print()\n```\n")
    for broken in (
        "```python\nassert 1 == 2\n```\n",
        "```python\n# a.py\nprint(42)\n```\n",
        "```python\n# a.py\nprint(42)\n```\n```console\n$ python a.py\n43\n```\n",
        "```console\n$ fairlane wrk shop:app\n```\n",
        "```console\n$ fairlane worker shop:app --workers 3\n```\n",
        "```py\nassert 1 == 1\n```\n",
        "```toml\na = 1\n```\n",
        "The file `a.toml`:\n\n```toml\na = 1\n```\n",
        "```ini\nExecStart=/srv/fairlane worker shop:app --slow\n```\n",
        "```console\n$ make coffee\n```\n",
        "```console\n$ .venv/bin/python -m pytest tests/test_coffee.py\n```\n",
        "```console\n$ wget example.com\n```\n",
        "*(Not run by the tests: no.)*\n```python\nassert False\n```\n",
    ):
        with pytest.raises(AssertionError):
            play(broken)


# Links.


def targets(text: str) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_internal_link_leads_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (anchor and anchor not in targets(target.read_text())):
            dead.append(link)
    assert dead == []


def test_the_index_lists_every_page_once() -> None:
    listed = re.findall(r"^- \[.+?\]\((.+?)\)", (DOCS / "README.md").read_text(), re.MULTILINE)
    pages = [str(page.relative_to(DOCS)) for page in PAGES if page.is_relative_to(DOCS) and page.name != "README.md"]
    assert sorted(listed) == sorted(pages)


def test_the_index_of_decisions_has_each_section_once_under_its_number() -> None:
    text = (DOCS / "explanation" / "decisions.md").read_text()
    sections = re.findall(r"^## (\d+)\. (.+)$", text, re.MULTILINE)
    headings = re.findall(r"^## (?!Index$)", text, re.MULTILINE)
    assert [int(number) for number, _ in sections] == list(range(1, len(headings) + 1))
    index = text.partition("\n## Index\n")[2].partition("\n## ")[0]
    listed = re.findall(r"^- \[(\d+)\. (.+?)\]\(#\1-.+?\)$", index, re.MULTILINE)
    assert sorted(listed) == sorted(sections)


# PostgreSQL.


def test_the_documented_roles_are_enough_to_produce_and_to_work(empty_postgres_url: str) -> None:
    [sql] = [
        block.text for block in blocks((DOCS / "how-to" / "use-postgresql.md").read_text()) if block.language == "sql"
    ]
    asyncio.run(_work_with_roles(sql, empty_postgres_url))


async def _work_with_roles(sql: str, url: str) -> None:
    place = urlsplit(url)
    by_superuser = sql.replace("on database shop ", f"on database {place.path[1:]} ")
    page = (DOCS / "how-to" / "use-postgresql.md").read_text()
    named = dict(re.findall(r"--(producer|worker|viewer|operator) (shop_\w+)", page))

    def as_role(role: str) -> str:
        return urlunsplit(place._replace(netloc=f"{role}@{place.hostname}:{place.port}"))

    try:
        await _execute(url, by_superuser)
        await App(as_role("shop_deploy")).migrate()
        await _execute(as_role("shop_deploy"), grants(named))
        app = App(as_role(named["worker"]))

        async def double(number: int) -> int:
            return 2 * number

        task = app.task(double)
        async with app, working(app):
            assert await (await task.enqueue(21)).result(timeout=WATCHDOG) == 42
    finally:
        roles = ", ".join(["shop_deploy", *named.values()])
        await _execute(url, f"drop owned by {roles} cascade; drop role {roles}")


async def _execute(url: str, sql: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(sql)
    finally:
        await connection.close()
