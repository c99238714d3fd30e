"""Provides the trained networks that a run needs: from the cache, or trained in lanes, each network once.

Networks that are not in the cache yet are grouped by their number of training points and their noise transform; the
groups may span several seeds. Each group is trained as lanes if the rule in `lanes` says so.
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
from bnn_runner.training.divergence import Diverged
from bnn_runner.training.engine import LaneTrainer
from bnn_runner.training.pretrained import PretrainedWeights, pretrained_network
from bnn_runner.training.state import Lane, TrainingConfig


@dataclass(frozen=True)
class Training:
    """One network that a run needs.

    Attributes:
        task: The data.
        lane_seed: Seed of the network.
        key: Cache key.
        label: Name for messages.
        trained: Whether it is trained; if not, it keeps its initial weights.
        noise_transform: Inserts noise layers, if the method requires them.
        pretrained: Weights of a network trained elsewhere; None to train here.
    """

    task: Task
    lane_seed: int
    key: str
    label: str
    trained: bool = True
    noise_transform: NoiseTransform | None = None
    pretrained: PretrainedWeights | None = None


@dataclass(frozen=True)
class NetworkProvider:
    """Trains networks or loads them from the cache.

    Attributes:
        config: Settings that all networks share.
        cache: Where trained networks are stored.
        device: Where to train.
        say: Prints one line for the user.
        progress: Called after every training step.
        stop: Returns true once a stop is requested.
    """

    config: TrainingConfig
    cache: NetworkCache
    device: torch.device
    say: Callable[[str], None]
    progress: Progress
    stop: Callable[[], bool]

    def train_missing(self, trainings: Sequence[Training]) -> dict[str, str]:
        """Trains the networks that are not in the cache.

        Returns:
            {key: reason} for the networks that diverged; all others are in the cache.

        Raises:
            Interrupted: If a stop was requested.
        """
        failed: dict[str, str] = {}
        paths = dict.fromkeys(t.pretrained.path for t in trainings if t.pretrained is not None)
        if paths:
            names = ", ".join(path.name for path in paths)
            self.say(f"trained networks: {len(paths)} pretrained ({names}), nothing to train")
        trainings = [t for t in trainings if t.trained and t.pretrained is None]
        missing = self._to_train(trainings)
        cached = len({t.key for t in trainings}) - len(missing)
        if cached:
            remaining = "nothing to train" if not missing else f"{len(missing)} to train"
            self.say(f"trained networks: {cached} from the cache, {remaining}")
        groups: dict[tuple[int, NoiseTransform | None], list[Training]] = {}
        for training in missing:
            groups.setdefault((len(training.task.train), training.noise_transform), []).append(training)
        for members in groups.values():
            failed |= self._train(members)
        return failed

    def load(self, training: Training) -> Network | None:
        """Returns a network: from the cache, pretrained (which it stores), or with initial weights if not `trained`.

        None if it should be in the cache but is missing or damaged.
        """
        if not training.trained and training.pretrained is None:
            return self._trainer([training]).network(0)
        module = self.skeleton(training)
        network = self.cache.load(training.key, module, self.device, self.config.dtype)
        if network is None and training.pretrained is not None:
            config = replace(self.config, noise_transform=training.noise_transform)
            network = pretrained_network(module, training.pretrained, config, training.task, training.key)
            self.cache.store(network)
        return network

    def skeleton(self, training: Training) -> nn.Module:
        """Returns a module with the network's architecture and arbitrary weights."""
        with global_stream(0, "skeleton"):
            config = replace(self.config, noise_transform=training.noise_transform)
            return config.build(training.task.spec).to(self.device, self.config.dtype)

    def _missing(self, trainings: Sequence[Training]) -> list[Training]:
        """The trainings without a readable entry in the cache, each key once."""
        unique = {t.key: t for t in trainings}
        return [t for t in unique.values() if not self.cache.has(t.key) or self.load(t) is None]

    def _to_train(self, trainings: Sequence[Training]) -> list[Training]:
        """The trainings that are missing, and those that were stored just before a process was killed.

        If a process was killed while it stored a group of lanes, the whole group is trained again. The missing ones
        alone would be trained with fewer lanes, which rounds differently.
        """
        missing = {t.key for t in self._missing(trainings)}
        by_key = {t.key: t for t in trainings}
        for keys in self.cache.partly_stored() if missing else ():
            if not missing.isdisjoint(keys) and by_key.keys() >= set(keys):
                missing.update(keys)
        return [t for key, t in by_key.items() if key in missing]

    def _train(self, members: Sequence[Training]) -> dict[str, str]:
        """Trains a group: all at once if the lanes can be stacked, else one after the other."""
        strategy = self._trainer(members).strategy
        if strategy == "loop":
            self.say(f"training {len(members)} networks one after the other")
            failed: dict[str, str] = {}
            for i, member in enumerate(members, 1):
                failed |= self._train_leased([member], f" {i} of {len(members)}")
            return failed
        if len(members) > 1:
            self.say(f"training {len(members)} networks together ({strategy} lanes)")
        # Decided once: trainers constructed later must not probe again and select another strategy.
        decided = replace(self, config=replace(self.config, stack="always"))
        return decided._train_leased(list(members), "")

    def _trainer(self, members: Sequence[Training]) -> LaneTrainer:
        config = replace(self.config, noise_transform=members[0].noise_transform)
        return LaneTrainer(config, [Lane(t.task, t.lane_seed, t.key) for t in members], self.device)

    def _train_leased(self, members: list[Training], suffix: str) -> dict[str, str]:
        """Trains under leases, so that no other process trains the same; skips what others finished while waiting."""
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
                trainer = self._trainer(members)
                name = digest([t.key for t in members])
                checkpoint, marker = self.cache.partial(name), self.cache.storing_marker(name)
                clear_unfinished(checkpoint.parent, checkpoint.name)
                if step := trainer.resume(checkpoint):
                    self.say(f"resuming from a checkpoint at step {step} of {trainer.total_steps}")
                if self.config.compile and (reason := trainer.compile()):
                    self.say(f"note: compile=true is not used ({reason})")
                try:
                    networks = trainer.train(
                        checkpoint, lambda s, done, total: self.progress(s + suffix, done, total), self.stop
                    )
                except Diverged as error:
                    # The lanes are independent: those that did not diverge are trained again without the others.
                    diverged = {members[i].key: members[i].label for i in error.lanes}
                    failed |= {key: f"{label}: {error}" for key, label in diverged.items()}
                    checkpoint.unlink(missing_ok=True)
                    members = [t for t in members if t.key not in diverged]
                    continue
                if len(networks) > 1:
                    write_json(marker, [n.key for n in networks])
                for network in networks:
                    self.cache.store(network)
                checkpoint.unlink(missing_ok=True)
                marker.unlink(missing_ok=True)
                break
            return failed
