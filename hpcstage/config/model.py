"""Declares every setting once: options, variables, YAML keys, `config show` and the commented default follow from it.

The module owns names, defaults, kinds and help. It does not own where values come from (`load`) nor what is done with
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hpcstage.config import parse
from hpcstage.plan.budget import BudgetAsked

DISK_VARIABLES = (
    "T4TMPDIR", "PBS_LOCALDIR", "PBS_JOBFS", "SGE_LOCALDIR", "PJM_LOCALTMP", "SLURM_TMPDIR", "LOCAL_SCRATCH",
    "TMPDIR_LOCAL", "FLUX_JOB_TMPDIR", "TMPDIR",
)  # fmt: skip
"""Variables in which schedulers and sites name the job's directory on the local disk, the best first."""


GROUPS = ("Datasets", "Local copies", "Several nodes", "Output files", "Checkpoints", "Elastic training", "The run")
"""The headings below which `hpcstage run --help` shows the settings, in its order."""


@dataclass(frozen=True)
class Setting:
    """One setting. `default` is written as a user would write it and goes through the same parser."""

    key: str
    default: str | tuple[str, ...]
    parse: parse.Parser
    help: str
    metavar: str = "TEXT"
    group: str = "The run"
    """The heading in `hpcstage run --help`; see `GROUPS`."""
    is_common: bool = False
    """Whether `hpcstage run --help` explains it at the top."""
    is_planned: bool = False
    """Whether `plan` takes it as well as `run`."""
    choices: tuple[str, ...] = ()
    is_path: bool = False
    """Whether `$VAR` and `~` are replaced where the shell has not done it: in files and variables."""
    repeats: bool = False
    """Whether the option may be given several times; YAML takes a list, the variable a list separated by colons."""
    is_switch: bool = False
    more: str = ""
    """Further lines for the commented default."""

    @property
    def env(self) -> str:
        """Returns the name of the variable that sets it."""
        return f"HPCSTAGE_{self.key.upper()}"

    @property
    def flag(self) -> str:
        """Returns the option that sets it."""
        return "--" + self.key.replace("_", "-")


def _declare(key: str, default: str | tuple[str, ...], parser: parse.Parser, text: str, **more: Any) -> Any:  # noqa: ANN401 - a field of any type
    return field(metadata={"setting": Setting(key, default, parser, text, **more)})


def _choice(key: str, default: str, choices: tuple[str, ...], text: str, **more: Any) -> Any:  # noqa: ANN401 - a field of any type
    shown = "|".join(choices)
    return _declare(key, default, parse.choice(*choices), text, metavar=shown, choices=choices, **more)


@dataclass(frozen=True)
class Config:
    """The values of all settings for this run. Field names carry units; `Setting.key` is what users write."""

    raw: Mapping[str, object]
    """For each key what was written, for people."""
    origin: Mapping[str, str]
    """For each key where the value came from: `option --mode`, `environment HPCSTAGE_MODE`, `./hpcstage.yaml:3`,
    `default`."""
    data: tuple[str, ...] = _declare(
        "data",
        (),
        parse.texts,
        "A dataset on the shared file system: a directory, glob, file, or @LIST (a file with "
        "one path per line, in the order in which your program reads them). Repeatable.",
        metavar="PATH",
        is_path=True,
        repeats=True,
        group="Datasets",
        is_common=True,
        is_planned=True,
    )
    mode: str = _choice(
        "mode",
        "runtime",
        ("runtime", "upfront", "direct"),
        "runtime copies while the command runs, upfront copies everything "
        "before it starts, direct copies nothing and only measures.",
        group="Datasets",
        is_common=True,
    )
    order: str = _declare(
        "order",
        "auto",
        parse.text(),
        "Order in which files are copied. auto takes the best that is known: what the program's samplers announce, "
        "else the @LIST, else the first opens of the last run, else by path. manifest (by path) and a file with one "
        "path per line are taken alone, and no sampler is run ahead.",
        metavar="auto|manifest|FILE",
        is_path=True,
        group="Datasets",
        is_planned=True,
    )
    """The order as it was written; see `order_asked`."""
    local_dir: str | None = _declare(
        "local_dir",
        "auto",
        parse.text("auto"),
        "Node-local directory: a path, '$VAR', ram (/dev/shm), none (do not "
        "stage), or auto (what the scheduler made for the job).",
        metavar="DIR|$VAR|ram|none|auto",
        more=f"auto takes the first that is set of {', '.join(DISK_VARIABLES)}; without a scheduler ${{TMPDIR:-/tmp}}.",
        group="Local copies",
        is_common=True,
        is_planned=True,
    )
    budget: str | None = _declare(
        "budget",
        "auto",
        parse.budget_text,
        "How much of the local disk hpcstage may use: bytes or a share of what is free, and inodes after a comma: "
        "800GiB, 80%, 500GB,2000000. auto is 80%, and on a shared disk of a shared node the job's share of that.",
        metavar="SIZE|N%[,INODES]",
        more="A job that has some of the node's processors gets the same share of what is free, unless its "
        "directory has a quota or a file system of its own.",
        group="Local copies",
        is_common=True,
        is_planned=True,
    )
    max_rate_bytes_per_s: float | None = _declare(
        "max_rate",
        "none",
        parse.rate("none"),
        "Most bytes per second that the whole job copies from the source ahead of the program, such as 500MB. What "
        "the program waits for is copied at once, as it would read it there itself, and counts.",
        metavar="SIZE|none",
        group="Local copies",
        is_planned=True,
    )
    placement: str = _choice(
        "placement",
        "replicate",
        ("private", "replicate", "partition"),
        "With several nodes: replicate (each file is read from the source by one node, and all nodes end with all "
        "files; partition where one has no room for all), partition (each file is kept by one node, others ask it), "
        "private (each node for itself).",
        group="Several nodes",
        is_common=True,
        is_planned=True,
    )
    nodes: int | None = _declare(
        "nodes",
        "auto",
        parse.whole(1, 4096, "auto"),
        "Number of nodes; auto is what the scheduler gave the job. Without a scheduler N virtual nodes are made on "
        "this machine, to try things out: they divide its disk and processors, and a plan says the same. In a job "
        "plan shows what N nodes would do.",
        metavar="N|auto",
        group="Several nodes",
        is_planned=True,
    )
    launcher: str = _choice(
        "launcher",
        "auto",
        ("auto", "srun", "pbsdsh", "qrsh", "mpiexec", "pjrsh", "none"),
        "What starts hpcstage on the other nodes; auto takes the scheduler's launcher, none starts nothing.",
        group="Several nodes",
    )
    run_dir: str | None = _declare(
        "run_dir",
        "auto",
        parse.text("auto"),
        "Directory for the plan, the record and the logs of the run; auto is ./hpcstage-runs/RUN-ID.",
        metavar="DIR|auto",
        is_path=True,
    )
    strict: bool = _declare(
        "strict",
        "false",
        parse.flag,
        "Exit with 125 before the command starts if staging cannot work; by default the command runs without it.",
        is_switch=True,
        metavar="",
    )
    intercept: str = _choice(
        "intercept",
        "auto",
        ("auto", "native", "python", "off"),
        "How opens are redirected to the local copies: native (C "
        "extension), python (patched functions), auto (the first that works), off.",
        group="Local copies",
    )
    drain_s: float = _declare(
        "drain",
        "8s",
        parse.duration(1),
        "How long the end of the run may take after the command has ended.",
        metavar="DURATION",
    )
    out: str | None = _declare(
        "out",
        "none",
        parse.text("none"),
        "Directory on the shared file system for what the command writes. {out} in the command's arguments, and "
        "$HPCSTAGE_OUT, name a directory on the local disk, whose files are copied to DIR while the command runs "
        "and at its end.",
        metavar="DIR|none",
        is_path=True,
        group="Output files",
        is_common=True,
    )
    drain_rate_bytes_per_s: float | None = _declare(
        "drain_rate",
        "none",
        parse.rate("none"),
        "Most bytes per second that are copied from the local disk to the directories of --out and --checkpoint.",
        metavar="SIZE|none",
        group="Output files",
    )
    drain_before_s: float = _declare(
        "drain_before",
        "5m",
        parse.duration(0),
        "From so long before the end of the job's time, copying to the directory of --out gives way to nothing, "
        "and every saved state is copied at once to that of --checkpoint.",
        metavar="DURATION",
        group="Output files",
    )
    time_limit_s: float | None = _declare(
        "time_limit",
        "auto",
        parse.duration(1, "auto"),
        "For --drain-before: the time that the job has, from the start of hpcstage. auto: until the end that Slurm "
        "tells; Grid Engine and PBS tell none.",
        metavar="DURATION|auto",
        group="Output files",
    )
    checkpoint: str | None = _declare(
        "checkpoint",
        "none",
        parse.text("none"),
        "Directory on the shared file system for the command's checkpoints. {checkpoint} in the command's "
        "arguments, and $HPCSTAGE_CHECKPOINT, name a directory on the local disk, which holds the newest state at "
        "the start. Each file or directory that is completed in it is saved in the background and copied to DIR.",
        metavar="DIR|none",
        is_path=True,
        group="Checkpoints",
        is_common=True,
    )
    protect: tuple[int, int] | None = _declare(
        "protect",
        "auto",
        parse.protection("auto"),
        "With several nodes: how many nodes (k) are protected by how many parities (m) against lost nodes, or the "
        "most that fits. auto: one parity. On one node checkpoints are protected by their copies in the directory "
        "of --checkpoint alone.",
        metavar="K+M|auto",
        group="Checkpoints",
    )
    protect_rate_bytes_per_s: float | None = _declare(
        "protect_rate",
        "none",
        parse.rate("none"),
        "Most bytes per second that each node sends to others for --protect.",
        metavar="SIZE|none",
        group="Checkpoints",
    )
    drain_every: int | None = _declare(
        "drain_every",
        "auto",
        parse.whole(1, 1_000_000, "auto"),
        "Copy each N-th saved state to the directory of --checkpoint; the newest is always copied at the end. auto "
        "copies the newest whenever the one before has been copied.",
        metavar="N|auto",
        group="Checkpoints",
    )
    elastic: tuple[int, int] | None = _declare(
        "elastic",
        "none",
        parse.count_range("none"),
        "Train on MIN to MAX nodes, and go on when nodes or processes are lost: hpcstage starts torchrun on each "
        "node, for a command `torchrun ... train.py` or `python train.py`. Without a scheduler there are MAX "
        "virtual nodes.",
        metavar="MIN:MAX|none",
        group="Elastic training",
        is_common=True,
    )
    policy: str = _declare(
        "policy",
        "minmax",
        parse.text(),
        "For --elastic: who decides whether to train on the nodes that are there. failstop, minmax, waitfor, "
        "keepbatch, finishifnear, timeleft, or a class of yours, FILE.py:CLASS; each with :ARGUMENTS.",
        metavar="NAME[:ARGUMENTS]",
        group="Elastic training",
    )
    survivors: str = _choice(
        "survivors",
        "restart",
        ("restart", "keep"),
        "For --elastic: what becomes of the processes on the nodes that are left. restart: torchrun starts all of "
        "them anew, and the program loads what it has saved. keep: they go on, in a program that uses "
        "hpcstage.torch.Elastic and gloo (no NCCL, no FSDP; not tried on GPUs).",
        group="Elastic training",
    )
    name: str | None = _declare(
        "name",
        "none",
        parse.name("none"),
        "For --elastic: the name by which nodes of other jobs join the training, with --join NAME. It may begin "
        "with fewer than MIN nodes of its own, and waits for those that join.",
        metavar="NAME|none",
        group="Elastic training",
    )
    join: str | None = _declare(
        "join",
        "none",
        parse.name("none"),
        "Add the nodes of this job to the training of that --name, which was started in the same working "
        "directory. No COMMAND is given: it is the training's.",
        metavar="NAME|none",
        group="Elastic training",
    )
    verbosity: int = 0
    """The verbosity: -1 with -q, 1 with -v."""
    warnings: tuple[str, ...] = ()
    """Texts about what looks like a mistake and does not stop a run."""

    def rows(self) -> list[dict[str, object]]:
        """Returns every value with where it came from, for `config show` and the record."""
        return [{"key": s.key, "value": self.raw[s.key], "source": self.origin[s.key]} for s in SETTINGS]

    def budget_asked(self) -> BudgetAsked:
        """Returns the budget in numbers and shares."""
        return BudgetAsked() if self.budget is None else parse.budget(self.budget)

    def order_asked(self) -> str:
        """Returns `auto`, `manifest` or the path of a list: see `plan.order.orders`."""
        return self.order.removeprefix("@")


_BY_FIELD: dict[str, Setting] = {f.name: f.metadata["setting"] for f in fields(Config) if "setting" in f.metadata}
SETTINGS: tuple[Setting, ...] = tuple(_BY_FIELD.values())
BY_KEY: dict[str, Setting] = {s.key: s for s in SETTINGS}
FIELD_OF: dict[str, str] = {s.key: name for name, s in _BY_FIELD.items()}
OTHER_VARIABLES: Mapping[str, str] = {
    f"HPCSTAGE_{name}": text
    for name, text in {
        "DISABLE": "1: `hpcstage run` only executes its command.",
        "CONFIG": "A YAML file with settings, as --config.",
        "SITE_CONFIG": "The site's YAML file, in the place of /etc/hpcstage.yaml.",
        "ACTIVE": "Set for the command: the run's id. A run inside a run only executes its command.",
        "RUN_ID": "Set for the command: the run's id.",
        "VERSION": "Set for the command: the version of hpcstage.",
        "RESULTS": "Set for the command: the run directory.",
        "NODE_DIR": "Set for the command: the run's directory on the local disk.",
        "STORE": "Set for the command: where the copies lie.",
        "SOCKET": "",
        "JOB": "",
        "ELASTIC_DIR": "",
        "ELASTIC_POLICY": "For `torchrun --rdzv-backend hpcstage`: the policy.",
        "ELASTIC_SURVIVORS": "",
        "ELASTIC_ENDS": "",
        "ELASTIC_HOST": "",
        "ELASTIC_PROCESSES": "",
        "ELASTIC_JOINS": "",
        "ELASTIC_DRAINED": "",
        "ELASTIC_SEATS": "",
        "ELASTIC_AGREED": "",
        "VIRTUAL_NODE": "",
    }.items()
}
"""Variables that belong to hpcstage and are no settings, with what a user should know of them."""
