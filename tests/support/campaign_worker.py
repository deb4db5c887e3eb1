"""A worker of a campaign that measures nothing: each case says how it ends."""

from __future__ import annotations

import json
import os
import signal
import sys
import time

from opcast.common.child_process import Channel


def main() -> None:
    channel = Channel()
    lost = os.environ.get("TEST_CAMPAIGN_LOST", "")

    def reply(**message: object) -> None:
        channel.send(json.dumps(message).encode())

    # As a framework that takes its time to be imported.
    time.sleep(float(os.environ.get("TEST_CAMPAIGN_START_S", "0")))
    faulted = False
    for request in map(json.loads, channel):
        if request["do"] == "hello":
            reply(done="hello", host={"platform": "cpu", "no_accelerator": "no driver"})
            continue
        if request["do"] == "anchors":
            if lost and os.path.exists(lost):  # noqa: PTH110 (no other import)
                reply(done="anchors", error="RuntimeError: no CUDA-capable device is detected")
            else:
                reply(
                    done="anchors",
                    row={"table": "anchors", "product_us": [1.0], "memory_us": [2.0]},
                )
            continue
        for case in request["cases"]:
            how = case["spec"]["how"]
            if how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            if how == "slow":
                time.sleep(0.2)
            if how == "hang":
                time.sleep(600)
            if how == "alive":
                for _ in range(3):
                    time.sleep(0.3)
                    reply(key=case["key"])
            if how == "fault" or (how == "broken" and faulted):
                faulted = True
                reply(key=case["key"], failed="XlaRuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS")
            elif how == "memory":
                reply(key=case["key"], failed="XlaRuntimeError: RESOURCE_EXHAUSTED: out of memory")
            elif how != "silent":
                row = {"table": "t", "key": case["key"], "process": os.getpid()}
                reply(key=case["key"], rows=[row])
        reply(done="run")


if __name__ == "__main__":
    sys.exit(main())
