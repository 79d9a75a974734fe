"""Makes the router of a model's engines from its options. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable

from foreword.config.options import Config
from foreword.core.readiness import OnLoadProgress
from foreword.core.structured_output import Vocabulary
from foreword.engine_client.forkserver import ForkServer
from foreword.engine_client.process_client import ProcessClient
from foreword.engine_client.remote import RemoteClient
from foreword.engine_client.replica import RouterReplica
from foreword.engine_client.router import EngineRouter
from foreword.planning.replica_resources import read_machine, replica_configs


def make_engine_client(
    config: Config,
    never_sampled_ids: tuple[int, ...],
    vocabulary: Callable[[], Vocabulary],
    on_progress: OnLoadProgress | None = None,
    fork_server: ForkServer | None = None,
) -> EngineRouter:
    """The engines of a config; see ProcessClient. The first one reports its progress.

    fork_server  starts the engines, and outlives them; None: one of their own
    """
    own_server = ForkServer() if fork_server is None else None
    server = fork_server or own_server
    assert server is not None
    is_only = config.replicas == 1 and not config.remote_urls
    configs = [config] if is_only else replica_configs(config, read_machine())
    replicas = []
    for index, own in enumerate(configs):
        progress = None if index else on_progress
        client = ProcessClient(own, never_sampled_ids, vocabulary, server, progress)
        replicas.append(RouterReplica("" if is_only else str(index), client))
    replicas += [remote_replica(config, url) for url in config.remote_urls]
    return EngineRouter(
        replicas,
        config.replica_timeout,
        own_server,
        is_open_ended=bool(config.remote_urls),
        max_model_len=config.max_model_len,
    )


def remote_replica(config: Config, url: str) -> RouterReplica:
    """The engine of the server at this URL."""
    assert config.engine_key is not None, "--replica-urls needs --engine-key"
    address = url.partition("://")[2]
    return RouterReplica(address, RemoteClient(url, config.engine_key, config.adapters), address)
