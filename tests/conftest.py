"""What every test gets: one thread a process, no network, repeatable examples, no left-overs."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

# Set before torch is imported, and inherited by every process that a test starts. On a small
# machine two test workers with a thread pool each would mostly wait for one another.
for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["EDGESPEC_HTTP"] = "none"  # coordinators of tests start no HTTP API unless they say so
RUN_MARK = "EDGESPEC_TEST_RUN"
os.environ[RUN_MARK] = str(os.getpid())

import httpx  # noqa: E402
import psutil  # noqa: E402
import pytest  # noqa: E402
from hypothesis import settings  # noqa: E402

from edgespec.net import slowness  # noqa: E402

slowness.MOST = 1.0  # commands that run in this process did not start slowly: it started long ago

EXIT_GRACE_S = 60.0  # what a process that was told to stop may take, beside much other work

for _phase in ("connect", "read", "write", "pool"):  # 5 s, for whatever names no other time
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, _phase, 60.0)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Started in the background by a shell, which takes Ctrl-C away from it: tests press it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("local", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def pytest_configure(config: pytest.Config) -> None:
    """In `make test` every property is tried on a quarter of the examples."""
    if "not thorough" in config.option.markexpr:
        settings.register_profile("quick", settings(), max_examples=settings().max_examples // 4)
        settings.load_profile("quick")


gc.disable()  # until all is imported and collected: what that makes stays for the whole run


def pytest_collection_finish() -> None:
    """What the modules and the items are made of is garbage at no time, and is not looked through.

    The collector would spend a tenth of a run on it.
    """
    gc.freeze()
    gc.enable()


def running_children() -> set[psutil.Process]:
    """The living descendants of this test process, without multiprocessing's own helper."""
    if not has_children():
        return set()
    children = psutil.Process().children(recursive=True)
    return {child for child in children if is_running(child)}


def has_children() -> bool:
    """Whether this process has any child: far cheaper to ask than which, and asked twice a test."""
    threads = Path("/proc/self/task").iterdir()
    try:
        return any((thread / "children").read_text() for thread in threads)
    except OSError:  # a thread that just ended, or a kernel that does not tell
        return True


def marked_processes() -> set[psutil.Process]:
    """Every living process that inherited this run's mark, adopted by init or not."""
    found = set()
    for process in psutil.process_iter():
        try:
            if process.environ().get(RUN_MARK) == str(os.getpid()) and is_running(process):
                found.add(process)
        except psutil.Error:  # gone, or not ours to read
            continue
    found.discard(psutil.Process())
    return found


def ancestors(process: psutil.Process) -> list[psutil.Process]:
    """Its parent, the parent of that, and so on."""
    try:
        return process.parents()
    except psutil.Error:  # gone
        return []


def is_running(process: psutil.Process) -> bool:
    """Whether a process still does something that a test would be to blame for."""
    try:
        dead = process.status() == psutil.STATUS_ZOMBIE
        return not dead and "resource_tracker" not in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def fail_on(left: set[psutil.Process], culprit: str) -> None:
    """Wait a little for ``left`` to end; kill and name whatever does not."""
    _, alive = psutil.wait_procs(left, timeout=EXIT_GRACE_S)
    stubborn = [process for process in alive if is_running(process)]
    names = []
    for process in stubborn:
        try:
            names.append(f"{process.pid}: {' '.join(process.cmdline())}")
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(stubborn, timeout=EXIT_GRACE_S)
    if names:
        pytest.fail(f"{culprit} left processes running (killed now):\n" + "\n".join(names))


@pytest.fixture(scope="session", autouse=True)
def _a_cluster_for_all(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The folder of a cluster of the tests' own, which every command that they start uses.

    Whoever has it is the cluster's owner: coordinator, stages and clients of a test need no token.
    """
    from support.keys import OWN

    from edgespec.daemon.cluster import VARIABLE, ClusterFolder, ClusterSettings

    folder = tmp_path_factory.mktemp("cluster")
    ClusterFolder.create(folder, ClusterSettings())
    (folder / "cluster.key").write_text(OWN.secret)  # that of rings in the test's own process
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, str(folder))
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_process_outlives_the_run() -> Iterator[None]:
    """Catches what fixtures of a wider scope forgot, and daemons whose parent is gone."""
    yield
    fail_on(marked_processes() | running_children(), "the test run")


@pytest.fixture(autouse=True)
def _no_process_outlives_its_test() -> Iterator[None]:
    """Fails the test that started a process and did not end it."""
    before = running_children()
    yield
    started = running_children() - before
    # What a daemon of a wider fixture starts is that fixture's to end.
    fail_on({process for process in started if not before & set(ancestors(process))}, "the test")
