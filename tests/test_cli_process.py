"""The `outrider` command as a process of its own: closed streams, limits, Ctrl-C, folders that are in its way."""

import signal
import subprocess
import sys

import onnx
import pytest

from tests.builders import model, node, tensor

PROVIDERS = """
import numpy
from outrider.providers.contract import Claim, Provider

class Relus(Provider):
    def claim(self, graph):
        return [Claim([node]) for node in graph.nodes if node.op_type == "Relu"]
    def compile(self, unit):
        return lambda inputs: [numpy.maximum(inputs[0], 0)]
"""


@pytest.fixture
def folder(tmp_path):
    """A model of a Relu and a Neg, and providers for the former."""
    nodes = [node("Relu", "x", "r", "relu"), node("Neg", "r", "y", "neg")]
    onnx.save(model(nodes, [tensor("x", ["n", 2])], [tensor("y", ["n", 2])]), tmp_path / "model.onnx")
    (tmp_path / "mine.py").write_text(PROVIDERS)
    return tmp_path


def shell(folder, command):
    """Exit code, stdout and stderr of a shell command with `outrider` as "$@", in a process of its own."""
    words = ["bash", "-c", command, "bash", sys.executable, "-P", "-m", "outrider"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


def test_closed_and_full_streams(folder):
    assert shell(folder, '"$@" run model.onnx <&- >&- 2>&-') == (0, "", "")
    assert shell(folder, '"$@" run absent.onnx <&- >&- 2>&-') == (2, "", "")
    code, out, err = shell(folder, '"$@" run model.onnx > /dev/full')
    assert (code, out) == (3, "")
    assert err == "outrider: the output cannot be written: No space left on device\n"


def test_files_beside_the_model_do_not_stand_in_for_packages(folder):
    for name in ("numpy", "outrider", "msgpack", "zmq", "onnx", "logging", "rich"):
        (folder / f"{name}.py").write_text(f"raise RuntimeError('this is not {name}')")
    for providers in ("cpu", "mine:Relus,cpu", "mine.py:Relus,cpu"):
        code, out, err = shell(folder, f'"$@" run model.onnx --providers {providers}')
        assert (code, err) == (0, ""), providers
        assert "2 nodes" in out


def test_a_current_folder_that_is_gone(folder):
    assert shell(folder, 'mkdir gone; cd gone; rmdir ../gone; "$@" run "$OLDPWD"/model.onnx')[0] == 0


def test_few_descriptors_are_one_paragraph(folder):
    told = set()
    for count in (14, 26, 30, 34, 60):
        code, _, err = shell(folder, f'ulimit -n {count}; "$@" run model.onnx')
        told.add(code)
        assert code in (0, 3)
        assert "is a bug" not in err
        assert "bytes" not in err  # memory is not what is short
    assert told == {0, 3}


def test_a_pipe_is_no_model(folder):
    code, _, err = shell(folder, 'mkfifo pipe.onnx; "$@" run pipe.onnx; code=$?; rm pipe.onnx; exit $code')
    assert (code, err) == (2, "outrider: pipe.onnx: is not a file.\n")


def test_ctrl_c_ends_a_long_run(folder):
    sleeps = "(print('it runs'), __import__('time').sleep(600))"
    (folder / "sleeps.py").write_text(PROVIDERS.replace("[numpy.maximum(inputs[0], 0)]", sleeps))
    command = [sys.executable, "-m", "outrider", "run", "model.onnx", "--providers", "sleeps.py:Relus,cpu", "--debug"]
    with subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as process:
        assert "it runs" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.endswith("outrider: interrupted\n")


@pytest.mark.parametrize("package", ["numpy", "onnx", "msgpack", "zmq"])
def test_a_missing_package_is_one_sentence(folder, package):
    hidden = f"import sys; sys.modules['{package}'] = None; import outrider.__main__ as m; sys.exit(m.main())"
    words = [sys.executable, "-c", hidden, "run", "model.onnx"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("outrider: a package that outrider needs cannot be imported: ")
    assert package in done.stderr
    assert "Traceback" not in done.stderr


def test_doctor_tells_a_missing_package(folder):
    hidden = "import sys; sys.modules['onnx'] = None; import outrider.__main__ as m; sys.exit(m.main())"
    words = [sys.executable, "-c", hidden, "doctor"]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3
    assert "packages     FAILS: ModuleNotFoundError: import of onnx halted" in done.stdout
