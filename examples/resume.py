"""Fine-tunes a real model, kills the run at random, resumes it, and compares it bit for bit with one that ran through.

    python examples/resume.py --steps 12 --interruptions 5

Every step commits model, optimizer, schedule and random number generators. A child process trains; it is killed with SIGKILL
at a random moment, also in the middle of a commit, and a new one goes on from the last commit that landed.
Prints figures; exits with 1 when the two runs differ.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deltastore import DeltaStore
from deltastore.errors import RevisionNotFoundError
from deltastore.training import gather_rng, restore_rng

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

BATCH, LENGTH = 2, 16


class Training:
    """A run of a model: masked inputs are drawn from all three generators, dropout is on."""

    def __init__(self, model: torch.nn.Module, batch: Any, steps: int) -> None:
        self.model = model.train()
        self.batch = batch
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.01)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 1e-3, total_steps=steps + 1)
        self.done = 0

    def step(self) -> float:
        """One optimizer step; returns the loss."""
        loss: torch.Tensor = self.batch(self.model)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.done += 1
        return float(loss.detach())

    def state(self) -> dict[str, Any]:
        """Everything that a new process needs to go on."""
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "rng": gather_rng(),
            "step": self.done,
        }


def real_run(steps: int) -> Training:
    """all-MiniLM-L6-v2 on sources of the standard library: a text and a masked copy of it shall be close.

    The upper two of its six layers are trained, the others are frozen.
    """
    from tokenizers import Tokenizer

    from benchmarks.training import load_model, model_folder, passages

    model = load_model().requires_grad_(False)
    model.encoder.layer[-2:].requires_grad_(True)
    tokenizer = Tokenizer.from_file(str(model_folder() / "tokenizer.json"))
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH)
    texts = [text for pair in passages(256, 0) for text in pair]
    tokens = torch.tensor([each.ids for each in tokenizer.encode_batch(texts)])
    mask = tokenizer.token_to_id("[MASK]")

    def batch(model: torch.nn.Module) -> torch.Tensor:
        chosen = tokens[[random.randrange(len(tokens)) for _ in range(BATCH)]]
        covered = torch.from_numpy(np.random.random(chosen.shape) < 0.15)
        hidden = [model(input_ids=each).last_hidden_state.mean(1) for each in (chosen, chosen.masked_fill(covered, mask))]
        return torch.nn.functional.cross_entropy(hidden[0] @ hidden[1].T, torch.arange(BATCH))

    return Training(model, batch, steps)


def tiny_run(steps: int) -> Training:
    """A model of a few kilobytes, for tests."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.2), torch.nn.GELU(), torch.nn.Linear(32, 4))

    def batch(model: torch.nn.Module) -> torch.Tensor:
        inputs = torch.randn(8, 16) * random.random() + float(np.random.standard_normal())
        return model(inputs).square().mean()

    return Training(model, batch, steps)


def train(folder: str, branch: str, steps: int, seed: int, tiny: bool) -> None:
    """Begin or go on with the run on `branch`; commits every step."""
    torch.set_num_threads(1)  # sums are then always taken in the same order
    torch.use_deterministic_algorithms(True)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    training = (tiny_run if tiny else real_run)(steps)
    with DeltaStore(folder) as store:
        try:
            snapshot = store.checkout(branch)
        except RevisionNotFoundError:
            pass  # the first time
        else:
            live = training.state()
            snapshot.load_into(live)
            restore_rng(live["rng"], strict=True)
            training.done = live["step"]
        while training.done < steps:
            loss = training.step()
            store.commit(training.state(), branch=branch, metadata={"step": training.done, "loss": loss})


@dataclass(frozen=True, slots=True)
class Report:
    """What happened. `equal` says whether both runs ended in the same state, bit for bit."""

    equal: bool
    steps: int
    kills: list[int]
    tensors: int
    state_bytes: int
    stored_bytes: int
    seconds: float


def compare(folder: str, steps: int, interruptions: int, seed: int, *, tiny: bool) -> Report:
    """Train through, then again with interruptions, and compare."""
    begin = time.monotonic()
    DeltaStore.create(folder, exist_ok=True).close()
    chance = random.Random(seed)
    processes = multiprocessing.get_context("forkserver")  # new processes, but torch is loaded once
    parts = ["torch", "torch._dynamo", "deltastore.commit", "deltastore.snapshot"]
    processes.set_forkserver_preload([*parts, *([] if tiny else ["transformers", "tokenizers"])])

    def start(branch: str) -> Any:
        child = processes.Process(target=train, args=(folder, branch, steps, seed, tiny))
        child.start()
        return child

    def finish(branch: str) -> None:
        child = start(branch)
        child.join()
        if child.exitcode != 0:
            raise SystemExit(f"the run on {branch!r} failed with exit code {child.exitcode}")

    finish("straight")
    kills: list[int] = []
    last_step = 0
    for number in range(interruptions):
        # at a random moment of a random step, so that all interruptions fit into the run
        until = chance.randint(last_step, max(last_step, (steps - 1) * (number + 1) // interruptions))
        child = start("interrupted")
        try:
            with DeltaStore(folder, read_only=True) as store:
                while child.is_alive() and committed(store) < until:
                    time.sleep(0.02)
            time.sleep(chance.random() * (0.05 if tiny else 1))
        finally:
            child.kill()  # SIGKILL
            child.join()
        with DeltaStore(folder, read_only=True) as store:
            last_step = committed(store)
        kills.append(last_step)
    finish("interrupted")
    return judge(folder, kills, time.monotonic() - begin)


def judge(folder: str, kills: list[int], seconds: float) -> Report:
    """Compare what is on the two branches: all states through the losses, the last ones bit for bit."""
    with DeltaStore(folder) as store:
        straight, interrupted = store.checkout("straight"), store.checkout("interrupted")
        trees = straight.commit.tree == interrupted.commit.tree  # values, too: learning rates, step, generators
        losses = [[commit.metadata["loss"] for commit in store.list_commits(name)] for name in ("straight", "interrupted")]
        return Report(
            equal=trees and losses[0] == losses[1] and not store.diff("straight", "interrupted"),
            steps=len(losses[1]),
            kills=kills,
            tensors=len(straight),
            state_bytes=straight.nbytes,
            stored_bytes=store.stats().stored_bytes,
            seconds=seconds,
        )


def committed(store: DeltaStore) -> int:
    """The last step of the interrupted run that landed."""
    heads = {ref.name: ref.commit_id for ref in store.list_refs()}
    return int(store.get_commit("interrupted").metadata["step"]) if "interrupted" in heads else 0


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--interruptions", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a model of a few kilobytes instead of MiniLM")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="deltastore-resume-") as folder:
        report = compare(f"{folder}/store", options.steps, options.interruptions, options.seed, tiny=options.tiny)
    print(f"steps                {report.steps}, killed after steps {', '.join(map(str, report.kills)) or 'none'}")
    print(f"state                {report.tensors} tensors, {report.state_bytes / 1e6:.1f} MB")
    print(f"stored               {report.stored_bytes / 1e6:.1f} MB for {2 * report.steps} commits")
    print(f"time                 {report.seconds:.0f} s")
    print(f"bit for bit equal    {'yes' if report.equal else 'NO'}")
    return 0 if report.equal else 1


if __name__ == "__main__":
    sys.exit(main())
