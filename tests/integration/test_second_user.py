"""Root's work in folders that the instances' user may write, with a real second user who plants links there.

Only root can become another user, so these need root; CI runs them as root.
"""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from launcher.base.address import UnixAddress
from launcher.base.errors import LauncherError
from launcher.base.files import make_folder, replace_file
from launcher.config.schema import Strategy
from launcher.engines.base import Launch
from launcher.engines.vllm.launch import cache_of
from launcher.instances.compile_cache import CompileCaches
from launcher.measure.tune.apply import apply_layout
from launcher.measure.tune.model import Layout

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can act for a second user: run scripts/test integration as root"
)

ROOT = Path(__file__).resolve().parents[2]
USER = 65534
"""nobody, on every Linux."""
AS_USER = (
    *("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--no-new-privs"),
    *("--bounding-set=-all", "--inh-caps=-all", "--"),
)
# The Python that runs the tests may lie where only root may look; the system's does not.
BECOME = (*AS_USER, "sh", "-c", 'shift; exec /usr/bin/python3 "$@"', "sh")
SECRET = "only root may read this"


@pytest.fixture
def caches() -> CompileCaches:
    return CompileCaches(become=BECOME)


@pytest.fixture
def base() -> Iterator[Path]:
    """A cache folder of the second user; pytest's temporary folders are readable by root only."""
    folder = Path(tempfile.mkdtemp(prefix="second-user-"))
    folder.chmod(0o755)
    cache = folder / "cache"
    cache.mkdir()
    os.chown(cache, USER, USER)
    yield cache
    subprocess.run(["rm", "-rf", folder], check=True)  # Python's rmtree gives up in folders that lie too deep


@pytest.fixture
def roots(base: Path) -> Path:
    """A folder that only root may enter, with a world-readable file in it."""
    folder = base.parent / "roots"
    folder.mkdir(mode=0o700)
    (folder / "secret").write_text(SECRET)
    (folder / "secret").chmod(0o644)
    return folder


def launch(base: Path, slot: int) -> Launch:
    folder = base / "vllm1" / f"slot{slot}"
    env = {"VLLM_CACHE_ROOT": f"{folder}/vllm", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
    argv = ("vllm", "serve", "/m")
    return Launch(
        argv=argv, env=env, secrets=frozenset(), address=UnixAddress("/x"), cache=cache_of(argv, env)
    )


def as_user(script: str, folder: Path) -> str:
    """Runs code as the second user, as a model's code could; returns its output."""
    done = subprocess.run(
        [*AS_USER, "sh", "-ec", f"umask 007; {script}"], cwd=folder, capture_output=True, text=True, check=True, timeout=240
    )  # fmt: skip
    return done.stdout


def readable(base: Path) -> str:
    """Every file below its cache that the second user can read."""
    return as_user("find . -type f -exec cat {} + 2>/dev/null || true", base)


def test_a_link_to_another_folder_discloses_nothing(
    caches: CompileCaches, base: Path, roots: Path, caplog: pytest.LogCaptureFixture
) -> None:
    one = launch(base, 0)
    as_user(f"mkdir -p vllm1/slot0; ln -s {roots} vllm1/slot0/inductor", base)
    caches.keep(0, one)
    caches.prepare(1, launch(base, 1))
    assert SECRET not in readable(base)
    assert "cannot stamp its compile cache" in caplog.text


def test_a_link_inside_a_cache_discloses_nothing(caches: CompileCaches, base: Path, roots: Path) -> None:
    as_user(f"mkdir -p vllm1/slot0/inductor; ln -s {roots}/secret {roots} vllm1/slot0/inductor", base)
    caches.keep(0, launch(base, 0))
    caches.prepare(1, launch(base, 1))
    assert (base / "vllm1/slot1/inductor/secret").is_symlink()
    assert SECRET not in readable(base)


def test_a_planted_stamp_overwrites_nothing(caches: CompileCaches, base: Path, roots: Path) -> None:
    as_user(f"mkdir -p vllm1/slot0/inductor; ln -s {roots}/secret vllm1/slot0/.stamp.json.0", base)
    caches.keep(0, launch(base, 0))
    assert (roots / "secret").read_text() == SECRET


def test_a_linked_folder_is_not_emptied(caches: CompileCaches, base: Path, roots: Path) -> None:
    (roots / "slot0" / "inductor").mkdir(parents=True)
    (roots / "slot0" / "inductor" / "precious").touch()
    as_user(f"ln -s {roots} vllm1", base)
    caches.purge(0, launch(base, 0))
    caches.prepare(0, launch(base, 0))
    assert (roots / "slot0" / "inductor" / "precious").exists()


def test_a_pipe_blocks_nothing(caches: CompileCaches, base: Path) -> None:
    as_user(
        "mkdir -p vllm1/slot0/inductor vllm1/slot2; mkfifo vllm1/slot0/inductor/p vllm1/slot2/stamp.json",
        base,
    )
    caches.keep(0, launch(base, 0))
    caches.prepare(1, launch(base, 1))
    assert (base / "vllm1/slot1/stamp.json").is_file()
    assert not (base / "vllm1/slot1/inductor/p").exists()


def test_endless_folders_end_in_a_warning(
    caches: CompileCaches, base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    as_user(
        "mkdir -p vllm1/slot0/inductor; cd vllm1/slot0/inductor; for i in $(seq 1500); do mkdir d; cd -P d; done",
        base,
    )
    caches.keep(0, launch(base, 0))
    caches.prepare(1, launch(base, 1))
    assert "slot 1: cannot copy a compile cache: folders lie too deep" in caplog.text


def test_a_copied_cache_belongs_to_the_user(caches: CompileCaches, base: Path) -> None:
    """Files and folders for nobody else, too; no mode beyond the permissions."""
    as_user("mkdir -p vllm1/slot0/inductor/aa; cd vllm1/slot0/inductor/aa; echo code >x.so; chmod 600 x.so; echo y >y; "
            "chmod 6755 y; chmod 2700 .", base)  # fmt: skip
    caches.keep(0, launch(base, 0))
    caches.prepare(1, launch(base, 1))
    copy = base / "vllm1/slot1/inductor/aa"
    assert (copy / "x.so").read_text() == "code\n"
    found = [
        copy,
        copy / "x.so",
        copy / "y",
        base / "vllm1/slot0/stamp.json",
        base / "vllm1/slot1/stamp.json",
    ]
    assert {path.stat().st_uid for path in found} == {USER}
    assert stat.S_IMODE((copy / "y").stat().st_mode) == 0o755
    assert stat.S_IMODE((copy / "x.so").stat().st_mode) == 0o600
    as_user("rm -r vllm1", base)


def test_a_cache_that_the_user_cannot_write_is_reported(
    caches: CompileCaches, base: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.chown(base, 0, 0)
    caches.prepare(0, launch(base, 0))
    assert "slot 0: cannot copy a compile cache: Permission denied" in caplog.text


def test_daemon_state_is_not_kept_in_the_users_folder(base: Path, roots: Path) -> None:
    (base.parent / "link").symlink_to(roots)
    os.chown(base.parent / "link", USER, USER, follow_symlinks=False)
    for folder in (base, base.parent / "link"):
        with pytest.raises(PermissionError, match="other users may write there"):
            replace_file(folder / "instances.json", b"{}")
        with pytest.raises(LauncherError, match="users other than its owner may write there"):
            make_folder(folder)
    assert sorted(path.name for path in roots.iterdir()) == ["secret"]


def test_results_of_root_beside_the_users_downloads(base: Path) -> None:
    """tmpfiles.conf gives the instances' user folders, and root those that root reads beside them."""
    root = base.parent
    (root / "etc").mkdir()
    (root / "etc/passwd").write_text(f"root:x:0:0::/:/bin/sh\nnuma-launcher:x:{USER}:{USER}::/:/bin/sh\n")
    (root / "etc/group").write_text(f"root:x:0:\nnuma-launcher:x:{USER}:\n")
    subprocess.run(
        ["systemd-tmpfiles", "--create", f"--root={root}", str(ROOT / "systemd/tmpfiles.conf")],
        check=True, capture_output=True, timeout=240,
    )  # fmt: skip
    state = root / "var/lib/numa-launcher"
    replace_file(make_folder(state / "tuning") / "best.json", b"{}", mode=0o644)
    as_user("touch huggingface/model home/own .cache/own; mv home/own home/own2; rm home/own2", state)
    for attack in (
        "touch own",
        "mkdir planted",
        "ls fleet",
        "ls ray",
        "rmdir fleet && mkdir fleet",
        "mv tuning elsewhere",
        "ln -sfn / bench",
        "rm -r tuning",
        "touch tuning/x",
        "echo x >tuning/best.json",
    ):
        with pytest.raises(subprocess.CalledProcessError):
            as_user(attack, state)
    assert (state / "tuning/best.json").read_bytes() == b"{}"


def test_a_configuration_of_another_user_stays_theirs(base: Path) -> None:
    """`sudo numa-launcher tune --apply` on the file of the user who runs the daemon."""
    file = base / "config.toml"
    file.write_text("[layout]\n")
    file.chmod(0o640)
    os.chown(file, USER, USER)
    os.setxattr(file, "user.note", b"x")  # as access control lists and security labels are stored
    layout = Layout(strategy=Strategy.CONTIGUOUS, instances_per_socket=2, reserve_cores="auto")
    kept = apply_layout(file, layout, now=datetime(2026, 11, 22, tzinfo=UTC)).kept
    assert kept is not None
    for path in (file, kept):
        facts = path.stat()
        assert (facts.st_uid, facts.st_gid, stat.S_IMODE(facts.st_mode)) == (USER, USER, 0o640)
        assert os.getxattr(path, "user.note") == b"x"
    as_user("echo >>config.toml", base)
