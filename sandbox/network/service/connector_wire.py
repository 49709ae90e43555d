"""Messages between a service gate and its connector, over a pair of SOCK_SEQPACKET sockets.

gate -> connector    an id, the number of a provider
connector -> gate    the id, 0 and a connected socket; or an errno
"""

from __future__ import annotations

import struct
from typing import Final

REQUEST: Final = struct.Struct("!IH")
REPLY: Final = struct.Struct("!II")
