"""The `outrider` command: its output, its exit codes, one readable paragraph for each error."""

import contextlib
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

import outrider
from outrider.tools.cli import main
from outrider.tools.opening import model_path

PROVIDERS = """
import numpy
from outrider.providers.contract import Claim, Decline, Provider

class Relus(Provider):
    def claim(self, graph):
        return [Claim([node]) if node.op_type == "Relu" else Decline(node, "only Relu") for node in graph.nodes]
    def compile(self, unit):
        return lambda inputs: [numpy.maximum(inputs[0], 0)]

class Talks(Relus):
    def setup(self, context):
        print("hello from setup")

class Fails(Relus):
    def compile(self, unit):
        return lambda inputs: 1 / 0

class Refuses(Provider):
    def setup(self, context):
        raise RuntimeError("no such device here")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model y = Relu(x) + w, z = Abs(x) with x of shape [n, 2], and files around it."""
    path = tmp_path_factory.mktemp("cli")
    tensor = helper.make_tensor_value_info
    graph = helper.make_graph(
        [
            helper.make_node("Relu", ["x"], ["r"], name="relu"),
            helper.make_node("Add", ["r", "w"], ["y"], name="add"),
            helper.make_node("Abs", ["x"], ["z"], name="abs"),
        ],
        "g",
        [tensor("x", TensorProto.FLOAT, ["n", 2])],
        [tensor("y", TensorProto.FLOAT, ["n", 2]), tensor("z", TensorProto.FLOAT, ["n", 2])],
        [helper.make_tensor("w", TensorProto.FLOAT, [2], [1, 2])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, path / "model.onnx")
    (path / "cut.onnx").write_bytes(model.SerializeToString()[:-9])
    (path / "mine.py").write_text(PROVIDERS)
    x = np.array([[1, -2], [-3, 4]], np.float32)
    np.save(path / "x.npy", x)
    np.save(path / "wide.npy", x.astype(np.float64))
    np.save(path / "flat.npy", x.ravel())
    np.savez(path / "feed.npz", x=x)
    np.savez(path / "right.npz", y=np.maximum(x, 0) + np.array([1, 2], np.float32), z=np.abs(x))
    np.savez(path / "wrong.npz", y=np.maximum(x, 0))
    np.savez(path / "other.npz", q=x)
    return path


def call(folder, *arguments):
    """Exit code, stdout and stderr of a command in `folder`, in this process."""
    out, err = io.StringIO(), io.StringIO()
    before = list(sys.path)
    with contextlib.chdir(folder), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main([str(one) for one in arguments])
        except SystemExit as leave:
            code = leave.code
        finally:
            sys.path[:] = before
    return code, out.getvalue(), err.getvalue()


def test_version_and_help(folder):
    assert call(folder, "--version") == (0, f"outrider {outrider.__version__}\n", "")
    code, out, _ = call(folder, "--help")
    assert code == 0
    assert all(word in out for word in ("run", "inspect", "doctor", "Exit codes"))


def test_run_tells_outputs_placement_and_verdict(folder):
    code, out, err = call(folder, "run", "model.onnx", "--input", "x=x.npy", "--expect", "right.npz", "--repeat", 3)
    assert (code, err) == (0, "")
    assert "3 nodes in 1 partition on 1 provider" in out
    assert "min 1  mean 2.75  max 6" in out
    assert "y: agrees" in out
    assert "z: agrees" in out
    assert "3 runs: first" in out


def test_run_differs(folder):
    code, out, _ = call(folder, "run", "model.onnx", "--feed", "feed.npz", "--expect", "wrong.npz")
    assert code == 1
    assert "y: max|difference| 2 is over 0.004" in out
    assert "z: not compared" in out
    code, out, _ = call(
        folder, "run", "model.onnx", "--feed", "feed.npz", "--expect", "wrong.npz", "--tolerance", 0.5, "--json"
    )
    assert code == 0
    document = json.loads(out)
    assert document["agrees"] is True
    assert document["expected"] == {"y": None}


def test_run_writes_a_trace(folder, tmp_path):
    traced = tmp_path / "trace.json"
    for _ in range(2):  # the second replaces the first
        code, out, err = call(folder, "run", "model.onnx", "--trace", traced)
        assert (code, err) == (0, "") and f"trace written to {traced}" in out
    kinds = {event.get("cat") for event in json.loads(traced.read_text())["traceEvents"]}
    assert kinds >= {"load", "claim", "plan", "run", "partition", "step"}
    assert os.listdir(tmp_path) == ["trace.json"]
    fails = ["--providers", "mine.py:Fails,cpu", "--trace", tmp_path / "failed.json"]
    assert call(folder, "run", "model.onnx", *fails)[0] == 3
    assert "KernelError" in (tmp_path / "failed.json").read_text()
    code, _, err = call(folder, "run", "model.onnx", "--trace", tmp_path / "nowhere" / "trace.json")
    assert code == 2 and "there is no folder" in err
    code, _, err = call(folder, "run", "model.onnx", "--trace", "model.onnx")
    assert code == 2 and "--trace" in err


def test_run_json_and_save(folder, tmp_path):
    saved = tmp_path / "out"
    code, out, err = call(folder, "run", "model.onnx", "--dim", "n=4", "--seed", 5, "--json", "--save", saved)
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["inputs_made"] is True
    assert document["inputs"]["x"]["shape"] == document["outputs"]["y"]["shape"] == [4, 2]
    assert set(document["placement"]) == {"partitions", "nodes", "transfers", "declines", "providers"}
    assert document["stats"]["runs"] == 1
    assert document["agrees"] is None
    assert document["seconds"]["runs"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    x = np.random.default_rng(5).standard_normal((4, 2)).astype(np.float32)
    with np.load(saved) as archive:
        np.testing.assert_array_equal(archive["z"], np.abs(x))
    assert call(folder, "run", "model.onnx", "--dim", "n=4", "--seed", 5, "--expect", saved, "--tolerance", 0)[0] == 0


def test_the_bundled_model_over_two_workers(tmp_path):
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    oracle = onnxruntime.InferenceSession(model_path("@basic-pitch"), options, providers=["CPUExecutionProvider"])
    name = oracle.get_inputs()[0].name
    feed = {name: np.random.default_rng(0).standard_normal((1, 43844, 1)).astype(np.float32)}
    results = dict(zip([one.name for one in oracle.get_outputs()], oracle.run(None, feed), strict=True))
    np.savez(tmp_path / "expected.npz", **results)
    pin = "*cq_t2010v2_1*=cpu:1"
    code, out, err = call(
        tmp_path, "run", "@basic-pitch", "--providers", "cpu,cpu:1", "--pin", pin, "--expect", "expected.npz", "--json"
    )
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["expected"] == dict.fromkeys(results)
    placed = {one["name"]: one["provider"] for one in document["placement"]["nodes"] if one["provider"]}
    assert {"cq_t2010v2_1" in name: provider for name, provider in placed.items()} == {True: "cpu:1", False: "cpu"}


def test_providers_of_the_current_folder(folder):
    """In processes of their own: neither this folder nor the provider's module is known here."""
    for entry in ("mine:Relus", "mine.py:Relus"):
        done = subprocess.run(
            [sys.executable, "-m", "outrider", "run", "model.onnx", "--providers", f"{entry},cpu", "--feed", "feed.npz",
             "--expect", "right.npz", "--json"],
            cwd=folder, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert done.stderr == ""
        nodes = {one["name"]: one["provider"] for one in json.loads(done.stdout)["placement"]["nodes"]}
        assert nodes == {"relu": entry, "add": "cpu", "abs": "cpu"}


def test_inspect(folder, tmp_path):
    page = tmp_path / "page.html"
    code, out, err = call(folder, "inspect", "model.onnx", "--providers", "mine.py:Relus,cpu,null", "--html", page)
    assert (code, err) == (0, "")
    assert "input   x     tensor(float)  ['n', 2]" in out
    assert "ai.onnx::Abs declined by mine.py:Relus: only Relu [1: abs]" in out
    assert "null" in out.split("Partitions")[0]
    assert page.read_text().startswith("<!DOCTYPE html>")
    code, out, _ = call(folder, "inspect", "model.onnx", "--json")
    document = json.loads(out)
    assert document["inputs"] == [{"name": "x", "type": "tensor(float)", "shape": ["n", 2], "dtype": "float32"}]
    assert [one["name"] for one in document["nodes"]] == ["relu", "add", "abs"]
    assert {(one["value"], one["from"], one["to"]) for one in document["transfers"]} == {
        ("x", "caller", "cpu"), ("y", "cpu", "caller"), ("z", "cpu", "caller"),
    }  # fmt: skip
    code, out, _ = call(folder, "inspect", "model.onnx", "--providers", "cpu,cpu:1", "--strategy", "replicate")
    assert (code, "2 replicas" in out) == (0, True)


def test_one_provider_of_a_file(folder, tmp_path):
    listed = tmp_path / "providers.toml"
    listed.write_text('[[provider]]\nkind = "null"\nname = "nothing"\n[[provider]]\nkind = "cpu"\n')
    code, out, _ = call(folder, "doctor", "--probe", "nothing", "--providers-file", listed, "--json")
    assert (code, json.loads(out)["provider"]) == (0, "nothing")
    chosen = ("--providers-file", listed, "--quick", "--shapes-only", "--only", "own/Relu*")
    code, out, _ = call(folder, "conformance", "nothing", *chosen, "--json")
    assert (code, json.loads(out)["provider"]) == (0, "nothing")
    code, _, err = call(folder, "conformance", "null", *chosen)
    assert code == 2 and "lists no provider 'null'; it lists nothing, cpu" in " ".join(err.split())


def test_doctor(folder):
    code, out, err = call(folder, "doctor", "--json")
    assert (code, err) == (0, "")
    document = json.loads(out)
    assert document["versions"]["outrider"] == outrider.__version__
    assert [one["name"] for one in document["providers"]] == ["cpu", "null"]
    assert all(one["ok"] for one in [*document["checks"], *document["providers"]])
    kernels = document["providers"][0]["compiled"]
    if shutil.which(os.environ.get("CC", "cc")):
        assert "conv" in kernels["families"] and kernels["from"] == "cache"
    else:
        assert "there is no C compiler" in kernels["reason"]
    code, out, _ = call(folder, "doctor", "--providers", "null,mine.py:Refuses,cpuu")
    assert code == 3
    assert "no such device here" in out
    assert "Did you mean cpu" in out


BAD_USAGE = [
    (["run", "absent.onnx"], "absent.onnx: there is no such file (the current folder is /"),
    (["run", ""], "'': there is no such file"),
    (["run", "cut.onnx"], "cut.onnx"),
    (["run", "."], "."),
    (["run", "@nothing"], "@basic-pitch"),
    (["run", "model.onnx", "--providers", "cpuu"], "Did you mean cpu"),
    (["run", "model.onnx", "--providers", "cpu,"], "provider"),
    (["run", "model.onnx", "--providers", "cpu,cpu"], "different names"),
    (["run", "model.onnx", "--providers", "cuda:0"], "CUDAExecutionProvider"),
    (["run", "model.onnx", "--providers", "cpu?threads"], "at character 5"),
    (["run", "model.onnx", "--providers-file", "absent.toml"], "absent.toml cannot be read"),
    (["bench", "hop", "--providers", "cpu"], "none with hop"),
    (["bench", "models", "--providers", "cpuu"], "Did you mean cpu"),
    (["run", "model.onnx", "--providers", "absent.py:Mine"], "absent.py"),
    (["run", "model.onnx", "--optimization", "fast"], "'basic'"),
    (["run", "model.onnx", "--strategy", "fast"], "'pipeline'"),
    (["run", "model.onnx", "--pin", "rel=cpu"], "relu"),
    (["run", "model.onnx", "--pin", "relu"], "--pin relu"),
    (["run", "model.onnx", "--pin", "relu=null"], "null"),
    (["run", "model.onnx", "--dim", "batch=2"], "Free are: n"),
    (["run", "model.onnx", "--dim", "n=two"], "--dim n two"),
    (["run", "model.onnx", "--dim", "n=2", "--feed", "feed.npz"], "--dim"),
    (["run", "model.onnx", "--repeat", 0], "--repeat"),
    (["run", "model.onnx", "--seed", -1], "--seed"),
    (["run", "model.onnx", "--tolerance", "nan"], "--tolerance"),
    (["run", "model.onnx", "--input", "x.npy"], "name=file.npy"),
    (["run", "model.onnx", "--input", "x=absent.npy"], "absent.npy"),
    (["run", "model.onnx", "--input", "q=x.npy"], "'q'"),
    (["run", "model.onnx", "--input", "x=wide.npy"], "float64"),
    (["run", "model.onnx", "--input", "x=flat.npy"], "shape [4]"),
    (["run", "model.onnx", "--feed", "other.npz"], "'q'"),
    (["run", "model.onnx", "--feed", "x.npy"], "x.npy"),
    (["run", "model.onnx", "--expect", "other.npz"], "'q'"),
    (["run", "model.onnx", "--expect", "absent.npz"], "absent.npz"),
    (["run", "model.onnx", "--save", "model.onnx"], "--save"),
    (["run", "model.onnx", "--feed", "feed.npz", "--save", "feed.npz"], "--save"),
    (["run", "model.onnx", "--save", "no/folder.npz"], "no/folder.npz"),
    (["inspect", "model.onnx", "--html", "no/folder.html"], "no/folder.html"),
]


@pytest.mark.parametrize(("arguments", "words"), BAD_USAGE)
def test_bad_usage_is_one_paragraph_and_exit_code_2(folder, arguments, words):
    before = {path: hashlib.sha256(path.read_bytes()).digest() for path in Path(folder).glob("*.*")}
    code, out, err = call(folder, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("outrider: ")
    assert "Traceback" not in err
    assert "\n\n" not in err
    assert words in err.replace("\n", " ")
    assert {path: hashlib.sha256(path.read_bytes()).digest() for path in Path(folder).glob("*.*")} == before


@pytest.mark.parametrize(
    "arguments",
    [[], ["fly"], ["run"], ["run", "model.onnx", "--repeat", "x"], ["run", "model.onnx", "--nonsense"],
     ["run", "model.onnx", "--input", "x=x.npy", "--feed", "feed.npz"]],
)  # fmt: skip
def test_what_argparse_refuses(folder, arguments):
    code, out, err = call(folder, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("usage: outrider")


@pytest.mark.parametrize(
    ("providers", "words"),
    [
        ("mine.py:Relus", "ai.onnx::Add"),
        ("mine.py:Refuses", "no such device here"),
        ("mine.py:Typo", "Typo"),
        ("no_such_package.module:Mine", "no_such_package"),
    ],
)
def test_other_failures_are_exit_code_3(folder, providers, words):
    code, out, err = call(folder, "run", "model.onnx", "--providers", providers)
    assert (code, out) == (3, "")
    assert err.startswith("outrider: ")
    assert words in err
    assert "is a bug" not in err
    assert "Traceback" not in err


def test_debug_shows_the_traceback(folder):
    for arguments in (["--debug", "run", "absent.onnx"], ["run", "absent.onnx", "--debug"]):
        code, _, err = call(folder, *arguments)
        assert code == 2
        assert "Traceback" in err
        assert "outrider: " in err


def test_a_reader_that_leaves_is_no_error(folder):
    command = f"{sys.executable} -m outrider inspect @basic-pitch | head -n 1"
    done = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""


def test_debug_shows_what_workers_print_and_their_tracebacks(folder):
    code, _, err = call(folder, "run", "model.onnx", "--providers", "mine.py:Talks,cpu")
    assert (code, err) == (0, "")
    code, _, err = call(folder, "run", "model.onnx", "--providers", "mine.py:Talks,cpu", "--debug")
    assert (code, err) == (0, "outrider.worker.mine.py:Talks: hello from setup\n")
    code, _, err = call(folder, "run", "model.onnx", "--providers", "mine.py:Fails,cpu")
    assert code == 3
    assert "Traceback" not in err
    assert err.endswith(".\nRun again with --debug to see the traceback.\n")
    code, _, err = call(folder, "run", "model.onnx", "--providers", "mine.py:Fails,cpu", "--debug")
    assert code == 3
    assert "In the worker:" in err
    assert "1 / 0" in err


def test_a_kernel_that_fails_on_made_inputs_says_that_they_were_made(tmp_path):
    tensor = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("MaxPool", ["x"], ["y"], kernel_shape=[2, 2])],
        "g",
        [tensor("x", TensorProto.FLOAT, ["n", 1, "h", None])],
        [tensor("y", TensorProto.FLOAT, None)],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "p.onnx")
    code, _, err = call(tmp_path, "run", "p.onnx", "--dim", "n=2")
    assert code == 3
    words = "The inputs were made, with size 1 for h, x.3, integers 0 or 1: give other sizes with --dim"
    assert words in err.replace("\n", " ")
    assert call(tmp_path, "run", "p.onnx", "--dim", "h=2", "--dim", "x.3=2")[0] == 0


def test_what_did_not_compile_is_told(folder):
    (folder / "broken.py").write_text(PROVIDERS.replace("return lambda inputs:", "raise ValueError('no room')  #"))
    code, out, _ = call(folder, "run", "model.onnx", "--providers", "broken.py:Relus,cpu")
    assert code == 0
    assert "note: broken.py:Relus claimed relu and could not compile it: ValueError: no room" in out


def test_names_of_a_model_do_not_command_the_terminal(tmp_path):
    tensor = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Relu", ["x"], ["y"], name="\x1b[2Jrelu")],
        "g",
        [tensor("x", TensorProto.FLOAT, [1])],
        [tensor("y", TensorProto.FLOAT, [1])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), tmp_path / "e.onnx")
    code, out, _ = call(tmp_path, "inspect", "e.onnx")
    assert code == 0
    assert "\\x1b[2Jrelu" in out
    code, _, err = call(tmp_path, "run", "e.onnx", "--providers", "null,cpu", "--pin", "\x1b[0m=cpu")
    assert code == 2
    assert "\x1b" not in out + err
