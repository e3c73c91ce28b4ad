//! `packing.json`: encodings inside frames.

use bytes::Bytes;
use kv_core::memory::MemoryKind;
use kv_core::wire::{WireErrorKind, msgpack, pack};
use serde_json::{Value, json};

use super::support::{File, hex, list, text, unhex};

const MAX: usize = 1 << 16;

fn kinds(names: &[String]) -> Vec<MemoryKind> {
    let kind = |name: &String| match name.as_str() {
        "VRAM" => MemoryKind::Vram { device: 0 },
        "DRAM" => MemoryKind::Dram,
        other => panic!("{other}"),
    };
    names.iter().map(kind).collect()
}

fn nested<T>(record: &Value)
where
    T: pack::Word + serde::de::DeserializeOwned + serde::Serialize + PartialEq + std::fmt::Debug,
{
    // A null component is packed as an empty one.
    let lists: Vec<Option<Vec<T>>> = list(&record["input"]);
    let lists: Vec<Vec<T>> = lists.into_iter().map(Option::unwrap_or_default).collect();
    let mut out = Vec::new();
    pack::put_nested(&mut out, lists.iter().map(Vec::as_slice)).unwrap();
    assert_eq!(hex(&out), record["packed"]);
    let read = pack::get_nested::<T>(&out, MAX, MAX).unwrap();
    assert_eq!(read, lists);
    if let Some(unpacked) = record.get("unpacked") {
        assert_eq!(json!(read), *unpacked);
    }
}

fn opaque(items: &[Option<String>]) -> Vec<Option<Bytes>> {
    items.iter().map(|item| item.as_deref().map(unhex)).collect()
}

#[test]
fn r_h1_every_packing_record() {
    File::read(include_str!("../../../kv-testkit/vectors/packing.json")).each(29, |record| {
        let mut out = Vec::new();
        match text(&record["fn"]) {
            "pack_list_of_buffers" => {
                let buffers: Vec<String> = list(&record["input"]);
                let buffers: Vec<Bytes> = buffers.iter().map(|buffer| unhex(buffer)).collect();
                pack::put_buffers(&mut out, &buffers).unwrap();
                assert_eq!(hex(&out), record["packed"]);
                let read: Vec<String> = pack::get_buffers(&out, MAX).unwrap().into_iter().map(hex).collect();
                assert_eq!(json!(read), record["unpacked"]);
            }
            "pack_int_lists" => match text(&record["fmt"]) {
                "i" => nested::<i32>(record),
                "I" => nested::<u32>(record),
                "Q" => nested::<u64>(record),
                other => panic!("{other}"),
            },
            "mori_pack_state_indices" => nested::<i32>(record),
            "nixl_pack_kv_mem_kinds" => {
                let kinds = kinds(&list::<Vec<String>>(&record["input"]));
                pack::put_mem_kinds(&mut out, &kinds);
                assert_eq!(hex(&out), record["packed"]);
                assert_eq!(pack::get_mem_kinds(&out, kinds.len(), 0).unwrap(), kinds);
            }
            "nixl_unpack_kv_mem_kinds" => {
                let entries = record["expected_len"].as_u64().unwrap() as usize;
                let read = pack::get_mem_kinds(text(&record["input"]).as_bytes(), entries, 0);
                match record["result"].as_array() {
                    Some(_) => assert_eq!(read.unwrap(), kinds(&list::<Vec<String>>(&record["result"]))),
                    None => {
                        let kind =
                            if record["input"] == "FOO" { WireErrorKind::BadText } else { WireErrorKind::Inconsistent };
                        assert!(record["result"]["error"].is_string());
                        assert_eq!(read.unwrap_err().kind, kind);
                    }
                }
            }
            "mori_pack_mem_desc_list" => {
                let items = opaque(&list::<Vec<Option<String>>>(&record["input"]));
                msgpack::put_descriptors(&mut out, &items).unwrap();
                assert_eq!(hex(&out), record["packed"]);
                assert_eq!(msgpack::get_descriptors(&Bytes::from(out), MAX).unwrap(), items);
            }
            "mori_pack_mem_desc_lists" => {
                let lists: Vec<Vec<Option<String>>> = list(&record["input"]);
                let lists: Vec<Vec<Option<Bytes>>> = lists.iter().map(|items| opaque(items)).collect();
                msgpack::put_descriptor_lists(&mut out, lists.iter().map(Vec::as_slice)).unwrap();
                assert_eq!(hex(&out), record["packed"]);
                assert_eq!(msgpack::get_descriptor_lists(&Bytes::from(out), MAX).unwrap(), lists);
            }
            other => panic!("nothing checks {other}"),
        }
    });
}
