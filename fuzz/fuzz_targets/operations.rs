//! `cargo +nightly fuzz run operations`: see `src/lib.rs`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| kvpager_fuzz::play(data));
