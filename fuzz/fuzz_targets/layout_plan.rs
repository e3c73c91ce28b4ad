#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| (kv_fuzz::target("layout_plan").unwrap().run)(data));
