"""Recurrent layers over states in pages: the calls, their kernels, and the chunked form."""

from pallas_kernels._recurrence.call import causal_conv1d as causal_conv1d
from pallas_kernels._recurrence.call import gated_delta_rule as gated_delta_rule
from pallas_kernels._recurrence.call import selective_scan as selective_scan
from pallas_kernels._recurrence.pages import StatePages as StatePages
from pallas_kernels._recurrence.requests import RequestStates as RequestStates
from pallas_kernels._recurrence.rule import Convolution as Convolution
from pallas_kernels._recurrence.rule import Replay as Replay
