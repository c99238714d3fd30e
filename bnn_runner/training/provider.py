"""Get the trained networks a run needs: from the cache, or trained in lanes, each training once.

Trainings of one run that are not cached yet are grouped by their number of points (those of one
task, or of several seeds' tasks) and by what the network is reworked to, and trained as lanes, if
the rule of `lanes` says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import nn

from bnn_runner.base import Network, NoiseTransform
from bnn_runner.config.keys import digest
from bnn_runner.rng import global_stream
from bnn_runner.runtime.console import Progress
from bnn_runner.runtime.files import clear_unfinished, write_json
from bnn_runner.runtime.leases import Lease
from bnn_runner.tasks import Task
from bnn_runner.training.cache import NetworkCache
from bnn_runner.training.engine import Diverged, LaneTrainer
from bnn_runner.training.pretrained import PretrainedWeights, pretrained_network
from bnn_runner.training.state import Lane, TrainingConfig


@dataclass(frozen=True)
class Training:
    """One network that a run needs: trained here, left as it starts (not `trained`), or `pretrained` elsewhere."""

    task: Task
    lane_seed: int
    key: str
    label: str
    trained: bool = True
    noise_transform: NoiseTransform | None = None
    pretrained: PretrainedWeights | None = None


@dataclass(frozen=True)
class NetworkProvider:
    """How trainings are obtained: training configuration, cache, device, messages and stop requests."""

    config: TrainingConfig
    cache: NetworkCache
    device: torch.device
    say: Callable[[str], None]
    progress: Progress
    stop: Callable[[], bool]

    def train_missing(self, trainings: Sequence[Training]) -> dict[str, str]:
        """Train what the cache lacks. Returns {key: reason} of those that diverged; the others are in the cache."""
        failed: dict[str, str] = {}
        given = {t.pretrained.path: t for t in trainings if t.pretrained is not None}
        if given:
            names = ", ".join(path.name for path in given)
            self.say(f"trained networks: {len(given)} pretrained ({names}), nothing to train")
        trainings = [t for t in trainings if t.trained and t.pretrained is None]
        missing = self._to_train(trainings)
        have = len({t.key for t in trainings}) - len(missing)
        if have:
            say = "nothing to train" if not missing else f"{len(missing)} to train"
            self.say(f"trained networks: {have} from the cache, {say}")
        alike: dict[tuple[int, NoiseTransform | None], list[Training]] = {}
        for training in missing:
            alike.setdefault((len(training.task.train), training.noise_transform), []).append(training)
        for members in alike.values():
            failed |= self._train(members)
        return failed

    def load(self, training: Training) -> Network | None:
        """A trained network out of the cache, one that is given, or one that is wanted untrained as it starts."""
        if not training.trained and training.pretrained is None:
            return self._group([training]).network(0)
        module = self.skeleton(training)
        network = self.cache.load(training.key, module, self.device, self.config.dtype)
        if network is None and training.pretrained is not None:
            config = replace(self.config, noise_transform=training.noise_transform)
            network = pretrained_network(module, training.pretrained, config, training.task, training.key)
            self.cache.store(network)
        return network

    def skeleton(self, training: Training) -> nn.Module:
        """A module of the network's shape, its numbers without meaning."""
        with global_stream(0, "skeleton"):
            config = replace(self.config, noise_transform=training.noise_transform)
            return config.build(training.task.spec).to(self.device, self.config.dtype)

    def _missing(self, trainings: Sequence[Training]) -> list[Training]:
        """Each key once; an entry counts only if it can be read."""
        unique = {t.key: t for t in trainings}
        return [t for t in unique.values() if not self.cache.has(t.key) or self.load(t) is None]

    def _to_train(self, trainings: Sequence[Training]) -> list[Training]:
        """What the cache lacks, and what was trained at once with it but stored before the process was killed.

        Without these, the others would be trained in other lanes, and round differently.
        """
        missing = {t.key for t in self._missing(trainings)}
        wanted = {t.key: t for t in trainings}
        for keys in self.cache.half_stored() if missing else ():
            if not missing.isdisjoint(keys) and wanted.keys() >= set(keys):
                missing.update(keys)
        return [t for key, t in wanted.items() if key in missing]

    def _train(self, members: Sequence[Training]) -> dict[str, str]:
        """Train members that are alike: all at once where they stack, else one after the other."""
        group = self._group(members)
        if group.strategy == "loop":
            self.say(f"training {len(members)} networks one after the other")
            failed: dict[str, str] = {}
            for i, member in enumerate(members, 1):
                failed |= self._train_leased([member], f" {i} of {len(members)}")
            return failed
        if len(members) > 1:
            self.say(f"training {len(members)} networks together ({group.strategy} lanes)")
        # Decided once: the groups made from here on must not probe again and find the other way faster.
        decided = replace(self, config=replace(self.config, stack="always"))
        return decided._train_leased(list(members), "")

    def _group(self, members: Sequence[Training]) -> LaneTrainer:
        config = replace(self.config, noise_transform=members[0].noise_transform)
        return LaneTrainer(config, [Lane(t.task, t.lane_seed, t.key) for t in members], self.device)

    def _train_leased(self, members: list[Training], suffix: str) -> dict[str, str]:
        """Train under leases, so that no other process trains the same; what it finished meanwhile is taken from it."""
        with ExitStack() as stack:
            for member in sorted(members, key=lambda t: t.key):
                lease = Lease(
                    self.cache.path(member.key),
                    lambda owner: self.say(f"waiting: {owner} is training the same network"),
                    self.stop,
                )
                stack.enter_context(lease)
            members = self._to_train(members)
            if not members:
                return {}
            for member in members:
                path = self.cache.path(member.key)
                clear_unfinished(path.parent, path.name)
            failed: dict[str, str] = {}
            while members:
                group = self._group(members)
                name = digest([t.key for t in members])
                checkpoint, note = self.cache.partial(name), self.cache.group_note(name)
                clear_unfinished(checkpoint.parent, checkpoint.name)
                if step := group.resume(checkpoint):
                    self.say(f"resuming from a checkpoint at step {step} of {group.total_steps}")
                if self.config.compile and (reason := group.compile()):
                    self.say(f"note: compile=true is not used ({reason})")
                try:
                    networks = group.train(
                        checkpoint, lambda s, done, total: self.progress(s + suffix, done, total), self.stop
                    )
                except Diverged as error:
                    # The lanes are independent: those that did not diverge are trained again without the others.
                    bad = {members[i].key: members[i].label for i in error.lanes}
                    failed |= {key: f"{label}: {error}" for key, label in bad.items()}
                    checkpoint.unlink(missing_ok=True)
                    members = [t for t in members if t.key not in bad]
                    continue
                if len(networks) > 1:
                    write_json(note, [n.key for n in networks])
                for network in networks:
                    self.cache.store(network)
                checkpoint.unlink(missing_ok=True)
                note.unlink(missing_ok=True)
                break
            return failed
