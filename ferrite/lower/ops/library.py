"""Operators whose work belongs to a library, or whose result has no shape before it runs: one call, with the reason."""

from __future__ import annotations

from typing import Any

import torch

from ferrite.capture import overloads
from ferrite.lower.table import EAGER, LOWERED, eager

aten = torch.ops.aten


def _called(names: str, because: str) -> None:
    """Every overload that a release of torch has, and that no other family lowers."""
    for name in names.split():
        packet: Any = getattr(aten, name, None)
        for operator in overloads(packet) if packet is not None else ():
            if not any(operator in table for table in (LOWERED, EAGER)):
                eager(operator, because=because)


_called(
    "_linalg_det _linalg_eigh _linalg_eigvals _linalg_slogdet _linalg_solve_ex _linalg_svd linalg_cholesky_ex "
    "linalg_eig linalg_householder_product linalg_inv_ex linalg_ldl_factor_ex linalg_ldl_solve linalg_lstsq linalg_lu "
    "linalg_lu_factor_ex linalg_lu_solve linalg_matrix_exp linalg_pinv linalg_qr linalg_solve_triangular "
    "cholesky cholesky_inverse cholesky_solve geqrf lu_unpack ormqr triangular_solve",
    because="a linear algebra library does it",
)
_called("_linalg_check_errors", because="it raises an error that depends on the data")
_called("_fft_r2c _fft_c2r _fft_c2c", because="a Fourier transform library does it")
_called(
    "nonzero nonzero_static masked_select repeat_interleave bincount unique_dim _unique2 _local_scalar_dense "
    "unique_consecutive argwhere",
    because="how many elements it has depends on the data",
)
_called(
    "_to_sparse to_sparse _to_dense _sparse_coo_tensor_with_dims _sparse_coo_tensor_with_dims_and_tensors "
    "_sparse_coo_tensor_unsafe _sparse_mm _sparse_mm_reduce_impl _sparse_mm_reduce_impl_backward _sparse_addmm "
    "_sparse_sum sparse_sampled_addmm _sparse_softmax _sparse_log_softmax sparse_mask _coalesce _indices _values "
    "_to_sparse_csr to_sparse_csr values crow_indices col_indices _validate_sparse_coo_tensor_args "
    "_validate_sparse_csr_tensor_args sparse_resize_ sparse_dim dense_dim _nnz is_coalesced _sparse_semi_structured_mm",
    because="a sparse tensor: torch's own kernels",
)
_called(
    "mkldnn_rnn_layer mkldnn_rnn_layer_backward _cudnn_rnn _cudnn_rnn_backward miopen_rnn miopen_rnn_backward "
    "_thnn_fused_lstm_cell _thnn_fused_gru_cell quantized_lstm quantized_gru",
    because="a recurrent layer: a library's own kernel",
)
_called(
    "_weight_int4pack_mm_for_cpu _weight_int8pack_mm _weight_int4pack_mm _dyn_quant_matmul_4bit "
    "_dyn_quant_pack_4bit_weight _fused_moving_avg_obs_fq_helper _fused_moving_avg_obs_fq_helper_functional "
    "quantize_per_tensor quantize_per_channel dequantize _make_per_tensor_quantized_tensor int_repr q_scale "
    "q_zero_point",
    because="quantised tensors: torch's own kernels",
)
_called(
    "histogram histogramdd _histogramdd_bin_edges _histogramdd_from_bin_cts _histogramdd_from_bin_tensors histc",
    because="how its bins are found is torch's own",
)
_called("segment_reduce _segment_reduce_backward", because="rows of unequal length")
_called("resize resize_ resize_as resize_as_ set_ set", because="it changes what memory a tensor has")
