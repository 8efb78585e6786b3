"""Ranks as detached, named Ray actors, the ranks of one launch packed onto one host by a placement group.

Ray owns placement and lifecycle and nothing per step. Actors outlive the launcher that made them; the next one finds
them by name. A rank on CPU asks for the custom resource ``headrace_slot``, because Ray's CPUs would bound how many
groups fit a host although ranks share its cores by threads.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
import ray
from ray.util import get_placement_group, list_named_actors, placement_group_table, remove_placement_group
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from workers.launchers.base import Deliver, Launch, LauncherFailed, LaunchError, RankEnded
from workers.launchers.ray_actor import RankActor
from workers.launchers.ray_names import RankName, launch_name, parse_rank_name
from workers.options import WorkerOptions

logger = logging.getLogger(__name__)

SLOT_RESOURCE = "headrace_slot"
CONNECT_SECONDS = 5.0
SENTINEL_SECONDS = 1.0
"""Longest time until a new rank is watched; ends of watched ones are seen at once."""
PENDING_SECONDS = 5.0
"""After which a placement that is not made is worth telling."""
REAP_SECONDS = 10.0


def connect(address: str, namespace: str) -> None:
    """Become a driver of the cluster at ``address`` (empty: ``RAY_ADDRESS``). Raises LaunchError."""
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        _check_reachable(address)
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        raise LaunchError(f"cannot connect to Ray at {address}: {_one_line(error)}") from error


def _check_reachable(address: str) -> None:
    """Raise OSError or ValueError for an address where nobody listens: Ray itself tries for minutes."""
    if address == "auto":
        return
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdigit()) or "/" in host:
        raise ValueError("write HOST:PORT of the cluster's head, or auto")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS):
        pass


class RayLauncher:
    """Launches in the namespace this process is connected to.

    ``notice`` is called, on the sentinel's thread, with what a person should know about a launch that waits.
    """

    def __init__(
        self,
        deliver: Deliver,
        *,
        model: str,
        tp: int,
        ranks: int,
        owns: Callable[[str], bool],
        notice: Callable[[str], None],
    ) -> None:
        self._deliver = deliver
        self._model = model
        self._tp = tp
        self._ranks = ranks
        self._owns = owns
        self._notice = notice
        self._watched: dict[Any, tuple[Launch, int]] = {}
        """The call that ends with a rank → the rank."""
        self._placing: dict[Launch, tuple[Any, float]] = {}
        """Launch → its placement group while that is not known to be made, and since when."""
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._closing = False
        self._sentinel = threading.Thread(target=self._watch, name="headrace-sentinel", daemon=True)
        self._sentinel.start()

    def adopt(self) -> list[Launch]:
        """Complete launches of this model found by name; incomplete ones are killed."""
        found: dict[Launch, list[int]] = {}
        with _ray_calls("find the ranks of an earlier launcher"):
            names = [parse_rank_name(text) for text in list_named_actors()]
        for name in names:
            if name is not None and name.model == self._model and self._owns(name.group):
                found.setdefault(Launch(name.group, name.incarnation, self._tp), []).append(name.rank)
        launches = [launch for launch, ranks in found.items() if sorted(ranks) == list(range(self._tp))]
        for launch in found:
            if launch not in launches:
                self.end(launch, 0.0)
                continue
            for rank in range(launch.tp):
                actor = self._actor(launch, rank)
                if actor is not None:
                    self._add(actor.ended.remote(), launch, rank)
                else:
                    self._deliver(RankEnded(launch.group, launch.incarnation, rank, f"rank {rank} is gone"))
        return launches

    def launch(self, ranks: Sequence[WorkerOptions]) -> None:
        """Ask for a placement group and for the actors in it; Ray makes them when the resources are there."""
        launch = Launch(_group(ranks[0]), _incarnation(ranks[0]), ranks[0].tp)
        try:
            with _ray_calls(f"start the ranks of group {launch.group}"):
                bundle = _bundle(ranks[0])
                group = placement_group(
                    [bundle] * len(ranks),
                    strategy="STRICT_PACK",
                    name=launch_name(self._model, launch.group, launch.incarnation),
                    lifetime="detached",
                )
                calls = [self._start(options, group, bundle) for options in ranks]
        except LaunchError:
            self.end(launch, 0.0)
            raise
        with self._lock:
            self._placing[launch] = (group, time.monotonic())
        for rank, call in enumerate(calls):
            self._add(call, launch, rank)

    def end(self, launch: Launch, grace: float) -> None:
        """Kill the launch's actors and give its placement back. There is no grace: a rank that is to finish first is
        told so by the scheduler's Stop."""
        with self._lock:
            self._placing.pop(launch, None)
        with _ray_calls(f"end the ranks of group {launch.group}"):
            for rank in range(launch.tp):
                actor = self._actor(launch, rank)
                if actor is not None:
                    ray.kill(actor)
            _remove_placement(launch_name(self._model, launch.group, launch.incarnation))

    def close(self) -> None:
        """Stop watching and disconnect; detached actors go on."""
        self._closing = True
        self._changed.set()
        self._sentinel.join()
        ray.shutdown()

    def _start(self, options: WorkerOptions, group: Any, bundle: dict[str, float]) -> Any:
        gpus = bundle.get("GPU", 0)
        actor: Any = (
            ray.remote(RankActor)
            .options(
                name=str(RankName(self._model, _group(options), _incarnation(options), options.rank)),
                lifetime="detached",
                max_restarts=0,
                num_cpus=0,
                num_gpus=gpus,
                resources={} if gpus else bundle,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=options.rank),
            )
            .remote()
        )
        return actor.run.remote(msgspec.json.encode(options), self._ranks_on_host())

    def _ranks_on_host(self) -> int:
        """How many of our ranks share a host when Ray spreads them evenly."""
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        hosts = sum(bool(node["Alive"]) for node in nodes)
        return -(-self._ranks // max(1, hosts))

    def _actor(self, launch: Launch, rank: int) -> Any | None:
        with suppress(ValueError):  # Ray's way of saying that there is none
            return ray.get_actor(str(RankName(self._model, launch.group, launch.incarnation, rank)))
        return None

    def _add(self, call: Any, launch: Launch, rank: int) -> None:
        with self._lock:
            self._watched[call] = (launch, rank)
        self._changed.set()

    def _watch(self) -> None:
        """The sentinel's thread."""
        try:
            self._watch_ranks()
        except ray.exceptions.RayError as error:
            self._deliver(LauncherFailed(f"Ray no longer answers: {_one_line(error)}"))

    def _watch_ranks(self) -> None:
        """A call that returns or fails is a rank that ended."""
        while not self._closing:
            with self._lock:
                calls = list(self._watched)
            if not calls:
                self._changed.wait()
                self._changed.clear()
                continue
            ended, _ = ray.wait(calls, num_returns=1, timeout=SENTINEL_SECONDS)
            for call in ended:
                self._finish(call)
            self._tell_pending()

    def _finish(self, call: Any) -> None:
        """A watched call is over: so is its rank, unless Ray only lost sight of it."""
        with self._lock:
            launch, rank = self._watched.pop(call)
        try:
            status: int | None = ray.get(call)
            cause = f"rank {rank} exited with status {status}"
        except ray.exceptions.ActorUnavailableError as error:
            actor = self._actor(launch, rank)
            if actor is not None:
                self._changed.wait(SENTINEL_SECONDS)
                self._add(actor.ended.remote(), launch, rank)
                return
            status, cause = None, f"rank {rank} died: {_one_line(error)}"
        except ray.exceptions.RayError as error:
            status, cause = None, f"rank {rank} died: {_one_line(error)}"
        self._deliver(RankEnded(launch.group, launch.incarnation, rank, cause, status))

    def _tell_pending(self) -> None:
        """Say what a launch waits for when Ray does not place it."""
        with self._lock:
            due = [
                (launch, group)
                for launch, (group, since) in self._placing.items()
                if time.monotonic() - since > PENDING_SECONDS
            ]
        for launch, group in due:
            with self._lock:
                self._placing.pop(launch, None)
            entry = placement_group_table(group)
            if entry["state"] == "PENDING":
                needs = ", ".join(f"{amount * launch.tp:g} {what}" for what, amount in entry["bundles"][0].items())
                self._notice(f"group {launch.group} waits for a Ray node with {needs} free")


def reap(namespace: str, address: str = "") -> int:
    """Kill every named actor of a namespace and remove its placement groups, whichever launcher made them.

    Returns how many actors there were. Connects when this process is not a driver yet. Raises LaunchError.
    """
    connected_before = ray.is_initialized()
    if not connected_before:
        connect(address, namespace)
    try:
        ours = [entry["name"] for entry in list_named_actors(all_namespaces=True) if entry["namespace"] == namespace]
        ends: list[Any] = []
        for name in ours:
            with suppress(ValueError):
                actor = ray.get_actor(name, namespace=namespace)
                if parse_rank_name(name) is not None:
                    ends.append(actor.ended.remote())
                ray.kill(actor)
        for entry in placement_group_table().values():
            if entry["name"] and entry["state"] != "REMOVED":
                _remove_placement(entry["name"])
        if ends:
            ray.wait(ends, num_returns=len(ends), timeout=REAP_SECONDS)
        return len(ours)
    finally:
        if not connected_before:
            ray.shutdown()


@contextmanager
def _ray_calls(what: str) -> Iterator[None]:
    """Raise LaunchError for whatever Ray raises."""
    try:
        yield
    except (ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise LaunchError(f"Ray could not {what}: {_one_line(error)}") from error


def _remove_placement(name: str) -> None:
    """Remove a placement group of this process's namespace, if it is there."""
    with suppress(ValueError):
        remove_placement_group(get_placement_group(name))


def _bundle(options: WorkerOptions) -> dict[str, float]:
    """What one rank asks of Ray: a GPU for a model on CUDA, a slot otherwise."""
    on_gpu = options.device.startswith("cuda")
    if options.device == "auto":
        resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        on_gpu = resources.get("GPU", 0) > 0
    return {"GPU": 1} if on_gpu and options.engine == "model" else {SLOT_RESOURCE: 1}


def _one_line(error: BaseException) -> str:
    """The last line of an error's text, where Ray puts the reason."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:500]


def _group(options: WorkerOptions) -> Any:
    return options.group


def _incarnation(options: WorkerOptions) -> Any:
    return options.incarnation
