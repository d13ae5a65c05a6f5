"""The same library in a worker of Outrider's: python with_outrider.py FAULT LIBRARY"""

import logging
import os
import sys
import time

import numpy
from vendor_provider import square_root

from outrider.scheduler import InferenceSession, ProviderSpec, RunOptions, SessionOptions, errors

HERE = os.path.dirname(os.path.abspath(__file__))
VENDOR = os.path.join(HERE, "vendor_provider.py:Vendor")
MODEL = square_root("")
GOOD = numpy.array([1, 4, 9, 16], numpy.float32)
BAD = numpy.array([1, 4, 9, numpy.nan], numpy.float32)


def segfault(library):
    named = ProviderSpec("ort", name="vendor", options={"library": library})
    try:
        InferenceSession(MODEL, providers=[named, "cpu"])
    except errors.ProviderUnavailableError as error:
        print(f"{type(error).__name__}: {error}\n")
    wished = ProviderSpec("ort", name="vendor", options={"library": library}, required=False)
    with InferenceSession(MODEL, providers=[wished, "cpu"]) as session:
        print("vendor:", session.health()["vendor"]["state"])
        print("by cpu:", session.run(None, {"x": GOOD})[0])


def hang(library):
    wished = ProviderSpec("ort", name="vendor", options={"library": library}, required=False)
    options = SessionOptions(start_deadline=10)
    with InferenceSession(MODEL, providers=[wished, "cpu"], options=options) as session:
        print("vendor:", session.health()["vendor"]["reason"])
        print("by cpu:", session.run(None, {"x": GOOD})[0])


def kernel(library):
    vendor = ProviderSpec(VENDOR, name="vendor", options={"operators": library})
    with InferenceSession(MODEL, providers=[vendor, "cpu"]) as session:
        print("good input:", session.run(None, {"x": GOOD})[0])
        try:
            session.run(None, {"x": BAD}, RunOptions(deadline=1))
        except errors.RunTimeoutError as error:
            print(f"{type(error).__name__}: {error}\n")
        print("good input:", session.run(None, {"x": GOOD})[0])
        start = time.monotonic()
        result = session.run(None, {"x": BAD}, RunOptions(partition_deadline=1))[0]
        print(f"bad input, after {time.monotonic() - start:.0f} s:", result)
        print("quarantined:", session.health()["vendor"]["quarantined"])
        print("good input:", session.run(None, {"x": GOOD})[0])


def twice(library):
    providers = [("ort:cpu_ep", {"library": library}), ("ort:cpu_ep:1", {"library": library})]
    options = SessionOptions(pins={"first": "ort:cpu_ep", "second": "ort:cpu_ep:1"})
    model = square_root("", ["first", "second"])
    with InferenceSession(model, providers=providers, options=options) as session:
        for node in session.placement().to_dict()["nodes"]:
            print(f"{node['name']}: {node['provider']}")
        print("fourth roots:", session.run(None, {"x": GOOD**2})[0])


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    logging.basicConfig(level=logging.ERROR)
    {"segfault": segfault, "hang": hang, "kernel": kernel, "twice": twice}[sys.argv[1]](sys.argv[2])
