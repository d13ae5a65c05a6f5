"""The kernels of the cpu provider, one module per operator family. Importing this package registers them all."""

from outrider.providers.cpu.kernels import activations as activations
from outrider.providers.cpu.kernels import attention as attention
from outrider.providers.cpu.kernels import binary as binary
from outrider.providers.cpu.kernels import casting as casting
from outrider.providers.cpu.kernels import chain as chain
from outrider.providers.cpu.kernels import convolution as convolution
from outrider.providers.cpu.kernels import elementwise as elementwise
from outrider.providers.cpu.kernels import indexing as indexing
from outrider.providers.cpu.kernels import lookup as lookup
from outrider.providers.cpu.kernels import matmul as matmul
from outrider.providers.cpu.kernels import nbits as nbits
from outrider.providers.cpu.kernels import normalization as normalization
from outrider.providers.cpu.kernels import pooling as pooling
from outrider.providers.cpu.kernels import qlinear as qlinear
from outrider.providers.cpu.kernels import quantized as quantized
from outrider.providers.cpu.kernels import quantized_recurrent as quantized_recurrent
from outrider.providers.cpu.kernels import quantizing as quantizing
from outrider.providers.cpu.kernels import random as random
from outrider.providers.cpu.kernels import recurrent as recurrent
from outrider.providers.cpu.kernels import reductions as reductions
from outrider.providers.cpu.kernels import resize as resize
from outrider.providers.cpu.kernels import shapes as shapes
from outrider.providers.cpu.kernels import signal as signal
from outrider.providers.cpu.kernels import strings as strings
from outrider.providers.cpu.kernels import transposed as transposed
from outrider.providers.cpu.kernels import views as views
