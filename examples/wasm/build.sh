#!/bin/sh
# Builds the modules that are committed beside their sources. Needs, on Debian and Ubuntu:
#   apt-get install clang lld wasi-libc libclang-rt-14-dev-wasm32 rustc libstd-rust-dev-wasm32
# RUSTC names another Rust compiler that has the target wasm32-unknown-unknown.
set -eu
cd "$(dirname "$0")"
clang --target=wasm32-wasi -mexec-model=reactor -Oz -Wall -Wextra -Wl,--strip-all c/complete.c -o c/complete.wasm
"${RUSTC:-/usr/bin/rustc}" --edition 2021 --target wasm32-unknown-unknown --crate-type cdylib -C opt-level=z -C lto \
  -C panic=abort -C strip=symbols -C linker="${LINKER:-wasm-ld}" rust/complete.rs -o rust/complete.wasm
ls -l c/complete.wasm rust/complete.wasm
