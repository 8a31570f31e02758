"""Which connector an engine has."""

from __future__ import annotations

from load_tests.engine.disagg.connector import Connector
from load_tests.engine.disagg.decoding import DecodeConnector
from load_tests.engine.disagg.mooncake import MooncakeConnector
from load_tests.engine.disagg.nixl import NixlConnector
from load_tests.engine.disagg.peers import PeerConnector
from load_tests.engine.disagg.prefilling import PrefillConnector
from load_tests.engine.disagg.pull import PullConnector
from load_tests.engine.disagg.shared import SharedConnector
from load_tests.engine.disagg.traffic import Traffic
from load_tests.engine.disagg.transceiver import TransceiverConnector
from load_tests.engine.faults import Faults
from load_tests.engine.options import EngineOptions

PULLING: dict[str, type[PullConnector]] = {
    "nixl": NixlConnector,
    "mooncake": MooncakeConnector,
    "p2p": PeerConnector,
    "transceiver": TransceiverConnector,
}


def make_connector(options: EngineOptions, faults: Faults, traffic: Traffic, port: int) -> Connector:
    """``port`` is that of its side channel or bootstrap server, 0 for a free one."""
    if options.connector in PULLING:
        return PULLING[options.connector](options, faults, traffic, port)
    if options.connector == "shared":
        return SharedConnector(options, faults, traffic)
    if options.connector == "bootstrap":
        if options.role == "prefill":
            return PrefillConnector(options, faults, traffic, port)
        return DecodeConnector(options, faults, traffic)
    return Connector(options, faults, traffic)
