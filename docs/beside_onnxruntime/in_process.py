"""The vendor's library in the user's own process: python in_process.py FAULT LIBRARY"""

import sys
import threading
import time

import numpy
import onnxruntime
from vendor_provider import square_root

GOOD = numpy.array([1, 4, 9, 16], numpy.float32)
BAD = numpy.array([1, 4, 9, numpy.nan], numpy.float32)


def segfault(library):
    print("registering the plugin")
    onnxruntime.register_execution_provider_library("vendor", library)
    print("registered")


def hang(library):
    print("registering the plugin")
    onnxruntime.register_execution_provider_library("vendor", library)
    print("registered")


def kernel(library):
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(library)
    session = onnxruntime.InferenceSession(square_root("vendor"), options)
    print("good input:", session.run(None, {"x": GOOD})[0])
    how = onnxruntime.RunOptions()
    run = threading.Thread(target=session.run, args=(None, {"x": BAD}, how))
    run.start()
    time.sleep(1)
    how.terminate = True
    run.join(timeout=3)
    print("3 s after terminate = True the run is", "still running" if run.is_alive() else "over")


def twice(library):
    onnxruntime.register_execution_provider_library("nxrt", library)
    onnxruntime.set_default_logger_severity(4)
    device = next(one for one in onnxruntime.get_ep_devices() if one.ep_name == "cpu_ep")
    options = onnxruntime.SessionOptions()
    options.add_provider_for_devices([device], {})
    options.add_provider_for_devices([device], {})
    try:
        onnxruntime.InferenceSession(square_root("", ["first", "second"]), options)
    except Exception as error:
        print(type(error).__name__, error)


if __name__ == "__main__":
    sys.stdout.reconfigure(line_buffering=True)
    {"segfault": segfault, "hang": hang, "kernel": kernel, "twice": twice}[sys.argv[1]](sys.argv[2])
