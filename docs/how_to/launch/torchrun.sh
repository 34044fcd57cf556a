#!/usr/bin/env bash
# {{ name }}: run this on each of {{ node_range }} nodes, with `runs` on a disk of all of them.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun --rdzv-endpoint {{ [host ~ ":" ~ port] | shell }} {{ arguments | shell }}
