"""Peak dense bf16 matrix throughput of known GPUs, in FLOP/s, as their makers state it (without sparsity).

Sources: the makers' data sheets, https://resources.nvidia.com/en-us-tensor-core and
https://www.amd.com/en/products/accelerators/instinct.html. NVIDIA prints most numbers with 2:4 sparsity;
half of that is here.
"""

# The first key that is part of the device's name counts, so a variant stands before its family.
_PEAK_BF16_FLOPS = {
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 NVL": 835e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "GH200": 989e12,
    "H800": 989e12,
    "GB200": 2500e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "A10G": 70e12,
    "L4": 121e12,
    "MI300X": 1307e12,
    "MI250X": 383e12,
}


def peak_flops(device_name: str) -> float | None:
    """Peak bf16 FLOP/s of a GPU by the name that torch gives it; None for one that is not in the table."""
    words = f" {device_name.replace('-', ' ').replace('_', ' ')} ".lower()
    for name, flops in _PEAK_BF16_FLOPS.items():
        if f" {name.lower()} " in words:
            return flops
    return None
