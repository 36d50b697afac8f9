"""The gateway as a process of its own that is watched and, when it dies, started again on the same port."""

from gyre_sdk.serving.settings import GatewaySettings, Tls
from gyre_sdk.serving.supervisor import GatewayProcess

__all__ = ["GatewayProcess", "GatewaySettings", "Tls"]
