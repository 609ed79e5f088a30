"""Programs of several languages that write output files: the tree in DIR is that of a plain directory.

Each is run twice, behind `hpcstage run --out DIR` with the local directory in $OUT, and without hpcstage with a plain
directory there. `follows` is another kind: `tail -f` of a log in DIR while the program writes it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.files import Place, empty
from benchmarks.outputtrees import differences
from benchmarks.programs import environment, run
from benchmarks.workload import writer
from hpcstage.emulator.build import cached_binary, compile_c

LIMIT_S = 120.0
FOLLOWED_S = 5.0
"""A line of a log is in DIR after this time at most."""
_C = Path(__file__).resolve().parent / "workload" / "writes.c"
SHELL = r"""
cd "$OUT" || exit 1
mkdir -p a/b c; echo one > a/one; echo two >> a/one; mv a/one a/b/two; cp -p a/b/two c/; ln -s ../a/b/two c/link
ln c/two c/hard; chmod 640 c/two; umask 077; echo secret > c/secret; sed -i s/two/three/ c/hard; : > c/empty
touch -d '2001-02-03 04:05:06' c/empty; rm earlier0; mv earlier1 moved; echo more >> earlier2
for n in 1 2 3 4 5; do echo "$n" > tmp && mv tmp latest; done; mkdir gone; echo x > gone/x; rm -r gone
chmod 500 a/b; mkdir -m 2750 group; truncate -s 5M c/sparse
dd if=/dev/zero of=c/sparse bs=1 seek=1000000 count=1 conv=notrunc
split -b 1000 earlier3 part. ; cat part.* > joined; gzip -kn joined; tee -a c/log < joined > /dev/null; cp -r c copied
"""
ROTATE = r"""
cd "$OUT" || exit 1
for day in 1 2 3 4 5 6; do
    for line in $(seq 200); do echo "day $day line $line" >> log; done
    for n in 3 2 1; do [ -e "log.$n" ] && mv "log.$n" "log.$((n + 1))"; done
    mv log log.1; : > log; sleep 0.3
done
cp log.1 kept && : > log.1   # as logrotate's copytruncate
"""
TAR = r"""
mkdir "$OUT/from" && cd "$OUT/from" && mkdir -p x/y/z && for n in $(seq 300); do echo "$n" > "x/y/z/$n"; done
ln -s y/z x/short; ln x/y/z/1 x/hard; chmod 751 x/y
tar -C "$OUT/from" --mtime=@0 --sort=name -cf "$OUT/all.tar" . && mkdir "$OUT/to"
tar -C "$OUT/to" -xpf "$OUT/all.tar"
tar -C "$OUT/from" -cz . | tar -C "$OUT/to" -xz
"""
NAMES = r"""
import os, sys
os.chdir(os.environb[b"OUT"])
names = [b"new\nline", b"tab\t", b"\xff\xfe not UTF-8", b" space ", b"-dash", b"*", b"quote'\""]
names += [b"\xe2\x98\x83", b"x" * 230]
names += [b"{" + b"out}", b"back\\slash", b"\x01control"]
for name in names:
    with open(name, "wb") as file:
        file.write(name)
    os.mkdir(name + b".d")
    os.symlink(name, name + b".d/link")
    os.rename(name, name + b".d/" + name)
    with open(name, "wb") as file:
        file.write(name * 2)
"""
DEEP = r"""
import os
at = os.environ["OUT"]
for depth in range(60):
    at += f"/directory{depth}"
    os.mkdir(at)
    for name in ("a", "b"):
        with open(f"{at}/{name}", "w") as file:
            file.write(f"{depth} {name}")
os.rename(os.environ["OUT"] + "/directory0/directory1", os.environ["OUT"] + "/up")
for number in range(2000):
    os.makedirs(os.environ["OUT"] + f"/wide/{number % 40}", exist_ok=True)
    with open(os.environ["OUT"] + f"/wide/{number % 40}/{number}", "w") as file:
        file.write(str(number))
"""
SQLITE = r"""
import os, sqlite3
for mode in ("delete", "wal"):
    base = sqlite3.connect(os.environ["OUT"] + f"/{mode}.db")
    base.execute(f"pragma journal_mode={mode}")
    base.execute("create table t (a integer primary key, b text)")
    for number in range(300):
        with base:
            base.execute("insert into t (b) values (?)", ("text " * number,))
    with base:
        base.execute("delete from t where a % 3 = 0")
    base.execute("vacuum")
    assert base.execute("pragma integrity_check").fetchone() == ("ok",)
    base.close()
"""
PYTHON = r"""
import mmap, multiprocessing, os, shutil, tempfile, zipfile, pathlib, subprocess
out = pathlib.Path(os.environ["OUT"])
def work(number):
    own = out / f"rank{number}"
    own.mkdir()
    for step in range(30):
        with tempfile.NamedTemporaryFile("wb", dir=own, delete=False) as file:
            file.write(bytes([number]) * 5000 * step)
        os.chmod(file.name, 0o644)
        os.replace(file.name, own / "last.ckpt")
        if step % 10 == 0:
            shutil.copy2(own / "last.ckpt", own / f"step{step}.ckpt")
    shutil.copytree(own, out / f"copy{number}")
    shutil.move(out / f"copy{number}", out / f"moved{number}")
processes = [multiprocessing.get_context("fork").Process(target=work, args=(number,)) for number in range(6)]
[process.start() for process in processes]
[process.join() for process in processes]
assert not any(process.exitcode for process in processes)
with open(out / "map", "wb+") as file:
    file.truncate(1 << 20)
    with mmap.mmap(file.fileno(), 0) as mapped:
        mapped[5000:5010] = b"0123456789"
with zipfile.ZipFile(out / "all.zip", "w") as archive:
    archive.writestr(zipfile.ZipInfo("entry"), "content")
shutil.rmtree(out / "moved0")
with open(out / "log", "a", buffering=1) as log:  # stays open while others rename it
    log.write("before\n")
    os.rename(out / "log", out / "log.old")
    log.write("after\n")
"""
PERL = r"""
my $out = $ENV{OUT}; mkdir "$out/perl"; open(my $f, "+>", "$out/perl/a") or die; print $f "x" x 100000; seek($f, 50, 0);
print $f "mid"; truncate($f, 60000); close $f; rename("$out/perl/a", "$out/perl/b") or die;
link("$out/perl/b", "$out/perl/c") or die; unlink("$out/perl/b") or die; symlink("c", "$out/perl/l") or die;
utime(1000000000, 1000000000, "$out/perl/c"); chmod(0604, "$out/perl/c");
open(my $e, ">>", "$out/earlier2") or die; print $e "perl"; close $e;
"""
NODE = r"""
const fs = require("fs"), out = process.env.OUT;
fs.mkdirSync(out + "/js/deep", {recursive: true});
for (let n = 0; n < 50; n++) { fs.writeFileSync(out + "/js/new", "n" + n);
    fs.renameSync(out + "/js/new", out + "/js/last"); }
fs.appendFileSync(out + "/js/log", "a\n"); fs.cpSync(out + "/js", out + "/js2", {recursive: true});
fs.rmSync(out + "/js/deep", {recursive: true}); fs.symlinkSync("last", out + "/js/link");
const stream = fs.createWriteStream(out + "/js/stream");
for (let n = 0; n < 1000; n++) stream.write("line " + n + "\n"); stream.end();
"""
WAYS: dict[str, list[str]] = {
    "shell": ["bash", "-c", SHELL],
    "log rotation": ["bash", "-c", ROTATE],
    "tar": ["bash", "-c", TAR],
    "names": [sys.executable, "-c", NAMES],
    "deep and wide": [sys.executable, "-c", DEEP],
    "sqlite": [sys.executable, "-c", SQLITE],
    "python": [sys.executable, "-c", PYTHON],
    "C": [],
    "perl": ["perl", "-e", PERL],
    "node": ["node", "-e", NODE],
    "follows": [],
}
LOG = r"""
import os, time
with open(os.environ["HPCSTAGE_OUT"] + "/log", "w") as log:
    for number in range(12):
        log.write(f"{number} {time.time()}\n")
        log.flush()
        time.sleep(0.5)
"""


class Ways:
    """The programs, each in fresh directories."""

    def __init__(self, where: Place) -> None:
        self._where = where
        self._base = where.memory / "ways"

    def one(self, name: str) -> dict[str, Any]:
        """One program; passed is None where this machine lacks its language."""
        if name == "follows":
            return self._follows()
        command = WAYS[name] or [os.fspath(compiled())]
        if shutil.which(command[0]) is None:
            return {"passed": None, "seconds": 0.0}
        empty(self._base)
        roots = [self._base / "results", self._base / "twin"]
        for root in roots:
            writer.start_with(root)
        done = run(
            self._behind(roots[0], ["env", "OUT={out}", *command]), self._where.disk, limit_s=LIMIT_S, check=False
        )
        plain = run(["env", f"OUT={roots[1]}", *command], self._where.disk, limit_s=LIMIT_S, check=False)
        differ = [*differences(*roots), *_full(*roots)]
        return {
            "seconds": done.seconds, "code": done.code, "plain_code": plain.code, "differences": differ[:20],
            "stderr": done.stderr[-1500:], "passed": not differ and done.code == plain.code == 0,
        }  # fmt: skip

    def _follows(self) -> dict[str, Any]:
        """How long after it was written each line of a log is told by `tail -f` of the log in DIR."""
        results = empty(self._base) / "results"
        results.mkdir()
        began = time.monotonic()
        words = self._behind(results, [sys.executable, "-c", LOG])
        process = subprocess.Popen(
            words, cwd=self._where.disk, env=environment(self._where.disk), stderr=subprocess.PIPE
        )
        tail = subprocess.Popen(["tail", "-F", results / "log"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert tail.stdout is not None
        late, numbers = [], []
        try:
            for line in iter(tail.stdout.readline, b""):
                number, at = line.split()
                numbers.append(int(number))
                late.append(time.time() - float(at))
                if len(numbers) == 12:
                    break
        finally:
            tail.kill()
            tail.communicate()
            _, said = process.communicate(timeout=LIMIT_S)
        return {
            "seconds": time.monotonic() - began, "latest_s": max(late), "code": process.returncode,
            "passed": numbers == list(range(12)) and max(late) <= FOLLOWED_S and process.returncode == 0,
            "stderr": said.decode()[-500:],
        }  # fmt: skip

    def _behind(self, results: Path, command: list[str]) -> list[str]:
        run_dir, local = empty(self._where.disk / "run"), self._where.local.renew()
        words = [sys.executable, "-m", "hpcstage", "run", "--out", str(results), "--local-dir", str(local)]
        return [*words, "--run-dir", str(run_dir), "--", *command]


def _full(found: Path, expected: Path) -> list[str]:
    """The sparse files that are not sparse any more."""
    full = []
    for path in expected.rglob("*"):
        other = found / path.relative_to(expected)
        if path.is_file() and not path.is_symlink() and other.is_file():
            one, copy = path.lstat(), other.lstat()
            if (
                copy.st_blocks * 512 > max(one.st_blocks * 512, one.st_size / 2) + 65536
                and one.st_blocks * 512 < one.st_size
            ):
                full.append(f"{path.name} has {copy.st_blocks} blocks instead of {one.st_blocks}")
    return full


def compiled() -> Path:
    """The program in C."""
    binary = cached_binary(_C)
    if not binary.exists():
        compile_c(_C, binary, [])
    return binary
