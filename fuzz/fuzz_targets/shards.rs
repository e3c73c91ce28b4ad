#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| (kv_fuzz::target("shards").unwrap().run)(data));
