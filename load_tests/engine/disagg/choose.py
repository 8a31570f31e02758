"""Which connector an engine has."""

from __future__ import annotations

from load_tests.engine.disagg.connector import Connector
from load_tests.engine.disagg.decoding import DecodeConnector
from load_tests.engine.disagg.nixl import NixlConnector
from load_tests.engine.disagg.prefilling import PrefillConnector
from load_tests.engine.disagg.traffic import Traffic
from load_tests.engine.faults import Faults
from load_tests.engine.options import EngineOptions


def make_connector(options: EngineOptions, faults: Faults, traffic: Traffic, port: int) -> Connector:
    """``port`` is that of its side channel, 0 for a free one."""
    if options.connector == "nixl":
        return NixlConnector(options, faults, traffic, port)
    if options.connector == "bootstrap":
        if options.role == "prefill":
            return PrefillConnector(options, faults, traffic, port)
        return DecodeConnector(options, faults, traffic)
    return Connector(options, faults, traffic)
