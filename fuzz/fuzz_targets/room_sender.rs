#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| (kv_fuzz::target("room_sender").unwrap().run)(data));
