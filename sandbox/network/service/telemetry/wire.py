"""Messages between the service gate and the sealed reader of telemetry, each a frame of a head and bytes.

gate -> reader    what to do, the signal, whether it is JSON, whether it is packed; and a body
reader -> gate    the outcome, two counts (records and bytes, or those rejected and 0); and a body, or why it is refused
"""

from __future__ import annotations

import struct
from typing import Final

ORDER: Final = struct.Struct("!BB??")
OUTCOME: Final = struct.Struct("!BII")
STAMP, ANSWER = 0, 1
DONE, MALFORMED, LARGE = 0, 1, 2
SIGNALS: Final = ("logs", "metrics", "traces")
# A body as the agent made it, packed or not.
BODY_BYTES: Final = 4 << 20
# A collector's answer.
ANSWER_BYTES: Final = 64 * 1024
# A body with the attributes of the run on each resource.
MOST_OUT: Final = 2 * BODY_BYTES
# Both messages whole.
ORDER_BYTES: Final = ORDER.size + BODY_BYTES
OUTCOME_BYTES: Final = OUTCOME.size + MOST_OUT
